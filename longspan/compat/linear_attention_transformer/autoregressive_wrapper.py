"""Training on next tokens, and generation from a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longspan.compat.generate import Filter, FilterSampler, decode, top_k, top_p
from longspan.compat.linear_attention_transformer.autopadder import Autopadder
from longspan.compat.linear_attention_transformer.linear_attention_transformer import LinearAttentionTransformerLM

__all__ = ["AutoregressiveWrapper", "top_k", "top_p"]


class AutoregressiveWrapper(nn.Module):
    """A language model with its loss and its generation. ignore_index: labels left out of the loss."""

    def __init__(self, net: LinearAttentionTransformerLM, ignore_index: int = -100, pad_value: int = 0) -> None:
        super().__init__()
        self.pad_value, self.ignore_index = pad_value, ignore_index
        if not isinstance(net, LinearAttentionTransformerLM):
            raise ValueError(f"net must be a LinearAttentionTransformerLM, got a {type(net).__name__}")
        self.net = Autopadder(net)
        self.max_seq_len = net.max_seq_len

    @torch.no_grad()
    def generate(
        self,
        start_tokens: Tensor,
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Up to seq_len tokens after start_tokens (T,) or (B, T); it ends when every row says eos_token at once."""
        was_training, net = self.net.training, self.net.net
        assert isinstance(net, LinearAttentionTransformerLM)
        if net.return_embeddings:
            raise ValueError("with return_embeddings there are no logits to choose a token by: build the model without")
        start = start_tokens if start_tokens.ndim == 2 else start_tokens[None]
        mask = None if input_mask is None else input_mask.reshape(start.shape)
        about = {} if context is None else {"context": context, "context_mask": context_mask}
        self.net.eval()
        out = decode(
            start,
            seq_len,
            FilterSampler(start, filter_logits_fn, filter_thres, temperature),
            window=self.max_seq_len,
            mask=mask,
            stop=eos_token,
            model=net.model if net.options.causal else None,
            recompute=lambda tokens, seen: self.net(tokens, input_mask=seen, **about),
            **about,
        )
        self.net.train(was_training)
        return out if start_tokens.ndim == 2 else out[0]

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        return_loss: bool = False,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, num_tokens) of x (B, T), or the mean loss of each token after those before it.

        x: also a list of sequences, padded with pad_value. input_mask: (B, T), or (B, T − 1) with return_loss; what it
        hides is not in the loss.
        """
        about = {"context": context, "context_mask": context_mask}
        if not return_loss:
            return self.net(self._padded(x), input_mask=input_mask, **about)
        into, labels = self._padded(x, slice(None, -1)), self._padded(x, slice(1, None))
        if input_mask is not None:
            mask = input_mask.bool()
            seen = mask[:, 1:] & mask[:, :-1] if mask.shape[1] > into.shape[1] else mask
            input_mask = mask[:, : into.shape[1]]
            labels = labels.masked_fill(~seen, self.ignore_index)
        logits = self.net(into, input_mask=input_mask, **about)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)

    def _padded(self, x: Tensor | Sequence[Tensor], part: slice = slice(None)) -> Tensor:
        if isinstance(x, Tensor):
            return x[:, part]
        return pad_sequence([row[part] for row in x], batch_first=True, padding_value=self.pad_value)
