"""Redirect imports of the older libraries to longspan: `import longspan.compat.auto` before importing them."""

from longspan.compat.import_hook import install

install()
