"""Training on next tokens, and generation from a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longspan.compat.generate import Filter, FilterSampler, decode, repetition_penalty_fn, top_k, top_p
from longspan.compat.performer_pytorch.performer_pytorch import PerformerLM
from longspan.ops.loss import IGNORE_INDEX

__all__ = ["AutoregressiveWrapper", "repetition_penalty_fn", "top_k", "top_p"]


class AutoregressiveWrapper(nn.Module):
    """A language model with its loss and its generation. ignore_index: labels left out of the loss.

    net: a PerformerLM, or a module that maps tokens (B, T), mask= and further arguments to logits, with max_seq_len;
    only the first streams.
    """

    def __init__(self, net: nn.Module, ignore_index: int = 0, pad_value: int = 0) -> None:
        super().__init__()
        self.net, self.ignore_index, self.pad_value = net, ignore_index, pad_value
        self.max_seq_len: int = net.max_seq_len  # type: ignore[assignment]

    def _model(self) -> PerformerLM | None:
        """The net, if its forward is the one we know."""
        net = self.net
        return net if isinstance(net, PerformerLM) and type(net).forward is PerformerLM.forward else None

    @torch.no_grad()
    def generate(
        self,
        start_tokens: Tensor,
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        repetition_penalty: float = 1.0,
        repetition_penalty_ctx: int = 32,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Up to seq_len tokens after start_tokens (T,) or (B, T); it ends when every row says eos_token at once.

        repetition_penalty: for the last repetition_penalty_ctx tokens of each row. more: for a net that is not a
        PerformerLM.
        """
        known = self._model()
        if more and known is not None:
            raise TypeError(f"generate of a PerformerLM has no argument {', '.join(more)}")
        start = start_tokens if start_tokens.ndim == 2 else start_tokens[None]
        about = {} if context is None else {"context": context, "context_mask": context_mask}
        sampler = FilterSampler(
            start, filter_logits_fn, filter_thres, temperature, repetition_penalty, repetition_penalty_ctx
        )
        was_training = self.net.training
        self.net.eval()
        try:
            out = decode(
                start,
                seq_len,
                sampler,
                window=self.max_seq_len,
                mask=None if mask is None else mask.reshape(start.shape),
                stop=eos_token,
                model=known.model if known is not None and known.options.causal else None,
                recompute=lambda tokens, seen: self.net(tokens, mask=seen, **about, **more),
                **about,
            )
        finally:
            self.net.train(was_training)
        return out if start_tokens.ndim == 2 else out[0]

    def forward(
        self, x: Tensor | Sequence[Tensor], return_loss: bool = True, mask: Tensor | None = None, **about: Any
    ) -> Tensor:
        """The mean loss of each token of x (B, T) after those before it, or with return_loss=False the logits of x.

        x: also a list of sequences, padded with pad_value. mask: (B, T), or (B, T − 1) for the tokens that are read;
        what they predict when hidden is not in the loss. about: context and context_mask.
        """
        if not isinstance(x, Tensor):
            if mask is None:
                mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in x], batch_first=True)
            x = pad_sequence(list(x), batch_first=True, padding_value=self.pad_value)
        if not return_loss:
            return self.net(x, mask=mask, **about)
        labels = x[:, 1:]
        if mask is not None:
            mask = mask.bool()[:, : labels.shape[1]]
            labels = labels.masked_fill(~mask, self.ignore_index)
        if (known := self._model()) is not None:
            # Without whole logits: a large vocabulary's would need more memory than the model.
            return known.loss(x[:, :-1], labels.masked_fill(labels == self.ignore_index, IGNORE_INDEX), mask, **about)
        logits = self.net(x[:, :-1], mask=mask, **about)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)
