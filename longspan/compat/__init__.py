"""The five older libraries, served by longspan: same names and arguments, and their checkpoints load.

`longspan.compat.performer_pytorch` stands for `performer_pytorch`, and so on. Each module translates arguments and
names; the mathematics is longspan's own. `docs/migrating.md` lists where behavior differs on purpose.
"""
