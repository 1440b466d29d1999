"""Replacements for five older libraries: the same names and arguments, and their checkpoints load.

`longspan.compat.performer_pytorch` replaces `performer_pytorch`, and so on. Each package translates arguments to a
`ModelConfig` (`options.py`) and state-dict keys to those of a longspan model (`keys.py`); all computation is in
`longspan.models`. `docs/migrating.md` lists the intentional differences in behavior.
"""

from longspan.compat.faithful import faithful

__all__ = ["faithful"]
