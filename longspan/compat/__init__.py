"""Replacements for five older libraries: the same names and arguments, and their checkpoints load.

`longspan.compat.performer_pytorch` replaces `performer_pytorch`, and so on. Each package has modules with the names of
the original, whose attention is computed by `longspan.mechanisms` and `longspan.ops`; its models convert to longspan
models. `docs/migrating.md` lists the intentional differences in behavior.
"""

from longspan.compat.faithful import faithful

__all__ = ["faithful"]
