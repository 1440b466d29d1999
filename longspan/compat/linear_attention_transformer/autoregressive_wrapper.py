"""AutoregressiveWrapper of linear-attention-transformer: the next-token loss and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longspan.compat.generate import Filter, FilterSampler, decode_model, generate, shift_labels, top_k, top_p
from longspan.compat.linear_attention_transformer.autopadder import Autopadder
from longspan.compat.linear_attention_transformer.linear_attention_transformer import LinearAttentionTransformerLM

__all__ = ["AutoregressiveWrapper", "top_k", "top_p"]


class AutoregressiveWrapper(nn.Module):
    """Next-token loss and generation for a language model.

    Args:
        net: The model.
        ignore_index: The label that has no loss.
        pad_value: The token that pads sequences of different lengths.

    The wrapper of a faithful model counts masked tokens in the loss and continues right-padded prompts from their
    padding, as in the original.
    """

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
        """Return up to seq_len tokens after start_tokens (T,) or (B, T).

        Generation ends early when every row chooses eos_token in the same step.
        """
        net = self.net.net
        assert isinstance(net, LinearAttentionTransformerLM)
        if net.return_embeddings:
            raise ValueError("a model with return_embeddings=True has no logits: build it without return_embeddings")
        cross: dict[str, Any] = {} if context is None else {"context": context, "context_mask": context_mask}
        return generate(
            self.net,
            start_tokens,
            seq_len,
            FilterSampler(start_tokens, filter_logits_fn, filter_thres, temperature),
            max_length=self.max_seq_len,
            model=decode_model(net) if net.causal and not net.faithful else None,
            recompute=lambda tokens, mask: self.net(tokens, input_mask=mask, **cross),
            mask=input_mask,
            eos_token=eos_token,
            keep_padding=net.faithful,
            **cross,
        )

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        return_loss: bool = False,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, num_tokens), or the mean loss of each token given the tokens before it.

        Args:
            x: Tokens (B, T), or a list of sequences, which are padded with pad_value.
            return_loss: Whether to return the loss.
            input_mask: (B, T), or (B, T − 1) with return_loss. Masked tokens are not part of the loss.
            context: (B, S, dim), with receives_context.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        cross = {"context": context, "context_mask": context_mask}
        if not return_loss:
            return self.net(self._pad(x), input_mask=input_mask, **cross)
        labels = self._pad(x, slice(1, None))
        if not self.net.net.faithful:
            labels, input_mask = shift_labels(labels, input_mask, self.ignore_index)
        elif isinstance(x, Tensor) and input_mask is not None:
            # The original drops a mask of the tokens that the model reads.
            input_mask = input_mask[:, :-1] if input_mask.shape == x.shape else None
        logits = self.net(self._pad(x, slice(None, -1)), input_mask=input_mask, **cross)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)

    def _pad(self, x: Tensor | Sequence[Tensor], part: slice = slice(None)) -> Tensor:
        if isinstance(x, Tensor):
            return x[:, part]
        return pad_sequence([row[part] for row in x], batch_first=True, padding_value=self.pad_value)
