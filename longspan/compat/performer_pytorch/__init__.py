"""Replacement for performer-pytorch 1.1.4."""

from longspan.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from longspan.compat.performer_pytorch.performer_enc_dec import PerformerEncDec
from longspan.compat.performer_pytorch.performer_pytorch import (
    CrossAttention,
    FastAttention,
    Performer,
    PerformerLM,
    ProjectionUpdater,
    SelfAttention,
)

__all__ = [
    "AutoregressiveWrapper",
    "CrossAttention",
    "FastAttention",
    "Performer",
    "PerformerEncDec",
    "PerformerLM",
    "ProjectionUpdater",
    "SelfAttention",
]
