"""`import longspan.compat.auto` before the older libraries: their names are then served by longspan."""

from longspan.compat.serving import serve

serve()
