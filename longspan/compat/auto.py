"""`import longspan.compat.auto` before the older libraries: their names are then served by longspan."""

from longspan.compat.import_hook import serve

serve()
