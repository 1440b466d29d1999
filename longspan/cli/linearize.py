"""The command `longspan linearize`: replace the softmax attention of a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.cli.arguments import parse
from longspan.train.linearize.config import LinearizeConfig


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    settings = parse(LinearizeConfig, argv, "linearize")
    try:
        import transformers
    except ImportError:
        raise ValueError("longspan linearize needs transformers: pip install 'longspan[hf,train]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from longspan.train.linearize.runner import linearize

    linearize(settings)
