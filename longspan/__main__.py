"""`python -m longspan`."""

from longspan.cli import main

main()
