"""AutoregressiveWrapper of performer-pytorch: the next-token loss and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longspan.compat.compressed import has_hooks
from longspan.compat.faithful import resolve_faithful
from longspan.compat.generate import (
    Filter,
    FilterSampler,
    decode_model,
    generate,
    repetition_penalty_fn,
    shift_labels,
    top_k,
    top_p,
)
from longspan.compat.helpers import exists
from longspan.compat.performer_pytorch.performer_pytorch import PerformerLM
from longspan.ops.loss import IGNORE_INDEX

__all__ = ["AutoregressiveWrapper", "exists", "repetition_penalty_fn", "top_k", "top_p"]


class AutoregressiveWrapper(nn.Module):
    """Next-token loss and generation for a language model.

    Args:
        net: A PerformerLM, which decodes from a state, or any module with max_seq_len that maps tokens (B, T), mask=
            and other keyword arguments to logits.
        ignore_index: The label that has no loss.
        pad_value: The token that pads sequences of different lengths.
        faithful: Whether to compute the loss and generate as the original does; by default as the net was built.
    """

    def __init__(
        self, net: nn.Module, ignore_index: int = 0, pad_value: int = 0, *, faithful: bool | None = None
    ) -> None:
        super().__init__()
        self.net, self.ignore_index, self.pad_value = net, ignore_index, pad_value
        self.max_seq_len: int = net.max_seq_len  # type: ignore[assignment]
        self.faithful = resolve_faithful(faithful) or (faithful is None and getattr(net, "faithful", False))

    def _performer(self) -> PerformerLM | None:
        """Return the net if it is a PerformerLM whose forward is not overridden."""
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
        **kwargs: Any,
    ) -> Tensor:
        """Return up to seq_len tokens after start_tokens (T,) or (B, T).

        Generation ends early when every row chooses eos_token in the same step. repetition_penalty applies to the last
        repetition_penalty_ctx tokens of each row. Other keyword arguments are for a net that is not a PerformerLM.
        """
        performer = self._performer()
        if kwargs and performer is not None:
            raise TypeError(f"generate of a PerformerLM has no argument {', '.join(kwargs)}")
        cross: dict[str, Any] = {} if context is None else {"context": context, "context_mask": context_mask}
        if self.faithful:

            def choose(logits: Tensor, tokens: Tensor) -> Tensor:
                if repetition_penalty > 1:
                    weights = torch.ones_like(logits[0])
                    weights[tokens[-repetition_penalty_ctx:].unique()] = repetition_penalty
                    logits = logits / weights
                scores = filter_logits_fn(logits, thres=filter_thres) / temperature
                return torch.multinomial(scores.softmax(-1), 1)

            return self._generate_faithfully(start_tokens, seq_len, eos_token, mask, choose, **cross, **kwargs)
        sampler = FilterSampler(
            start_tokens, filter_logits_fn, filter_thres, temperature, repetition_penalty, repetition_penalty_ctx
        )
        decodes = performer is not None and performer.options.causal and not performer.faithful
        return generate(
            self.net,
            start_tokens,
            seq_len,
            sampler,
            max_length=self.max_seq_len,
            model=decode_model(performer) if performer is not None and decodes else None,
            recompute=lambda tokens, mask: self.net(tokens, mask=mask, **cross, **kwargs),
            mask=mask,
            eos_token=eos_token,
            **cross,
        )

    def _generate_faithfully(
        self,
        start_tokens: Tensor,
        seq_len: int,
        eos_token: int | None,
        mask: Tensor | None,
        choose: Callable[[Tensor, Tensor], Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """Generate from the last slot of each prompt. choose: Returns a token (B, 1) for logits and all tokens."""
        tokens = start_tokens if start_tokens.ndim == 2 else start_tokens[None]
        T, visible = tokens.shape[1], torch.ones_like(tokens, dtype=torch.bool)
        if mask is not None:
            visible = mask.bool().reshape(tokens.shape)
        training = self.net.training
        self.net.eval()
        try:
            for _ in range(seq_len):
                window, shown = tokens[:, -self.max_seq_len :], visible[:, -self.max_seq_len :]
                logits = self.net(window, mask=shown, **kwargs)[:, -1]
                token = choose(logits, tokens)
                tokens, visible = torch.cat([tokens, token], 1), F.pad(visible, (0, 1), value=True)
                if eos_token is not None and bool((token == eos_token).all()):
                    break
        finally:
            self.net.train(training)
        return tokens[:, T:] if start_tokens.ndim == 2 else tokens[0, T:]

    def forward(
        self, x: Tensor | Sequence[Tensor], return_loss: bool = True, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the mean loss of each token given the tokens before it, or logits with return_loss=False.

        Args:
            x: Tokens (B, T), or a list of sequences, which are padded with pad_value.
            return_loss: Whether to return the loss.
            mask: (B, T), or (B, T − 1) for the tokens that the model reads. Masked tokens and tokens after them
                are not part of the loss.
            **kwargs: context and context_mask, or other arguments of the net.
        """
        if not isinstance(x, Tensor):
            if mask is None:
                mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in x], batch_first=True)
            x = pad_sequence(list(x), batch_first=True, padding_value=self.pad_value)
        if not return_loss:
            return self.net(x, mask=mask, **kwargs)
        labels = x[:, 1:]
        if self.faithful:
            mask = None if mask is None else mask.bool()[:, : labels.shape[1]]
        else:
            labels, mask = shift_labels(labels, mask, self.ignore_index)
        if (performer := self._performer()) is not None and not has_hooks(performer):
            labels = labels.masked_fill(labels == self.ignore_index, IGNORE_INDEX)
            return performer.loss(x[:, :-1], labels, mask, **kwargs)
        logits = self.net(x[:, :-1], mask=mask, **kwargs)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)
