"""`python -m longspan`."""

from longspan.cli import app

app(prog_name="longspan")
