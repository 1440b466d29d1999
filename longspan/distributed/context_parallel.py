"""Context parallelism: each rank holds one contiguous piece of every sequence of a batch."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longspan.distributed.collectives import all_reduce, gather
from longspan.distributed.shard import Shard
from longspan.layout import Packing
from longspan.models.residual import StackState
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel, Transformer
from longspan.ops.loss import IGNORE_INDEX

Model = Transformer | LanguageModel | EncoderDecoder | Classifier


class ContextParallel(nn.Module):
    """A model whose ranks each run one piece of every sequence, in the order of the ranks.

    Pieces may have different lengths, and be empty. Every rank must make the same calls. Gradients of parameters are
    those of this rank's piece: their sum over the ranks, by `reduce_gradients`, is the gradient.

    Args:
        model: A longspan model, with equal weights on all ranks.
        group: The ranks, in the order of their pieces: a process group, or a device mesh of one dimension.

    Raises:
        ValueError: If the model cannot be divided, or the group is not one.
    """

    def __init__(self, model: Model, group: dist.ProcessGroup | DeviceMesh) -> None:
        super().__init__()
        if not isinstance(model, Transformer | LanguageModel | EncoderDecoder | Classifier):
            raise ValueError(
                "context parallelism takes a Transformer, LanguageModel, EncoderDecoder or Classifier, or a model of "
                f"longspan.hf, got a {type(model).__name__}"
            )
        for part in (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,):
            if part.config.legacy.axial_stride is not None:
                raise ValueError(
                    "axial attention cannot be divided over ranks: its rows are every n-th token of a sequence; use "
                    "axial_stride=None"
                )
        self.model, self.group = model, as_group(group)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Run this rank's piece.

        Args:
            x: (B, T) tokens, or (B, T, dim) vectors for a model without a vocabulary.
            key_mask: (B, T) bool, True for real tokens of the piece.
            packing: The packing of the whole sequence, equal on all ranks.
            context: (B, S, dim) this rank's piece of the context, for a model with cross-attention.
            context_mask: (B, S) bool, True for real tokens of that piece.

        Returns:
            What the model returns for the piece; of a Classifier of sequences the logits of the whole, on every rank.
        """
        model = self.model
        if isinstance(model, EncoderDecoder):
            raise ValueError("an EncoderDecoder computes a loss: call loss(target, source=...)")
        if isinstance(model, Classifier):
            return self._classify(model, x, key_mask, packing)
        layout = self._shard("forward", x, key_mask, packing).layout(x, key_mask)
        return model(x, _layout=layout, **self._context(context, context_mask, packing))

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy over the tokens of all ranks; other arguments as for `forward`.

        Args:
            tokens: (B, T) this rank's tokens; of an EncoderDecoder those of the target.
            labels: (B, T), −100 where a label does not count; the next token unless given.
            key_mask: (B, T) bool, True for real tokens of the piece.
            packing: The packing of the whole sequence.
            context: (B, S, dim) this rank's piece of the context.
            context_mask: (B, S) bool, True for real tokens of that piece.
            source: (B, S) this rank's piece of the source, for an EncoderDecoder.
            source_mask: (B, S) bool, True for real tokens of that piece; without one, pad_token is padding.
        """
        model = self.model
        if isinstance(model, EncoderDecoder):
            if source is None:
                raise ValueError("an EncoderDecoder needs source=, this rank's piece (B, S) of the source")
            key_mask = tokens != model.pad_token if key_mask is None else key_mask
            context, context_mask = self._encode(model, source, source_mask)
            model = model.decoder
        if not isinstance(model, LanguageModel):
            raise ValueError(f"a {type(model).__name__} has no loss of tokens: call it, and compute the loss yourself")
        shard = self._shard("loss", tokens, key_mask, packing, labels_given=labels is not None)
        layout = shard.layout(tokens, key_mask)
        labels = shard.next_tokens(tokens, layout) if labels is None else labels
        context_given = self._context(context, context_mask, packing)
        if tokens.shape[1]:
            mean = model.loss(tokens, labels, _layout=layout, **context_given)
        else:  # 0, and takes part in the backward pass
            mean = model(tokens, _layout=layout, **context_given).sum()
        return self.mean(mean, labels)

    def mean(self, mean: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over all ranks of a mean over this rank's labels (B, T) that are not −100."""
        count = (labels != IGNORE_INDEX).sum()
        total = count.clone()
        dist.all_reduce(total, group=self.group)
        return all_reduce(mean * (count.to(mean.dtype) / total.clamp(min=1)), self.group)

    def extend(self, x: Tensor, state: StackState, *, key_mask: Tensor | None = None) -> tuple[Tensor, StackState]:
        """Run this rank's piece of new tokens after those of a state; causal models only.

        Args:
            x: (B, T) tokens, or (B, T, dim) vectors for a Transformer.
            state: What the model's `new_state` or `extend` returned, equal on all ranks.
            key_mask: (B, T) bool, True for real tokens of the piece.

        Returns:
            The logits or vectors of the piece, and the state after the tokens of all ranks, on every rank. A rank's
            gradient of `state` is that of its piece: they add up.
        """
        model = self.model
        if not isinstance(model, Transformer | LanguageModel) or not model.config.causal:
            raise ValueError("only a causal Transformer or LanguageModel can be extended: build it with causal=True")
        if not isinstance(state, StackState):
            raise TypeError(f"state must be what new_state or extend returned, got a {type(state).__name__}")
        layout = self._shard("extend", x, key_mask, None, start=state.end).layout(x, key_mask)
        return model.extend(x, state, key_mask=key_mask, _layout=layout)

    def reduce_gradients(self) -> None:
        """Add up the gradients of the ranks, in place."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=self.group)

    def _shard(
        self,
        method: str,
        x: Tensor,
        key_mask: Tensor | None,
        packing: Packing | None,
        *,
        causal: bool | None = None,
        start: Tensor | None = None,
        labels_given: bool = False,
    ) -> Shard:
        if causal is None:
            causal = (self.model.decoder if isinstance(self.model, EncoderDecoder) else self.model).config.causal
        call = {"width": x.shape[2] if x.ndim == 3 else 0, "labels_given": labels_given}
        call |= {"training": self.model.training, "gradients_are_on": torch.is_grad_enabled()}
        return Shard(self.group, x, key_mask, packing, causal=causal, start=start, method=method, **call)

    def _context(self, context: Tensor | None, mask: Tensor | None, packing: Packing | None) -> dict[str, Any]:
        """Return the arguments of a model for this rank's piece of a context."""
        if context is None:
            return {}
        if packing is not None:
            raise ValueError("packed sequences with a context cannot be divided over ranks: pass them unpacked")
        layout = self._shard("context", context, mask, None, causal=False).layout(context, mask)
        return {"context": context, "_context_layout": layout}

    def _encode(self, model: EncoderDecoder, source: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = source != model.pad_token if mask is None else mask
        layout = self._shard("source", source, mask, None, causal=False).layout(source, mask)
        return model.encode(source, mask, _layout=layout)

    def _classify(self, model: Classifier, x: Tensor, key_mask: Tensor | None, packing: Packing | None) -> Tensor:
        """Return the logits of each token, or of the mean over all ranks' tokens, to which each rank adds its own."""
        if packing is not None:
            raise ValueError("a Classifier takes no packing")
        shard = self._shard("forward", x, key_mask, None)
        layout = shard.layout(x, key_mask)
        x = x if model.project is None else model.project(x, key_mask)
        body = model.body.hidden if isinstance(model.body, LanguageModel) else model.body
        vectors = body(x, _layout=layout)
        if model.config.pooling == "none":
            return model.to_classes(vectors)
        if key_mask is not None:
            vectors = vectors.masked_fill(~key_mask[..., None], 0)
        mean = vectors.sum(1) / shard.counts.sum(0).clamp(min=1)[:, None].to(vectors.dtype)
        head = model.to_classes
        return all_reduce(nn.functional.linear(mean, head.weight, head.bias / shard.ranks), self.group)


def context_parallel(model: Any, group: dist.ProcessGroup | DeviceMesh) -> Any:
    """Divide the sequences of a model over the ranks of a group; its weights become those of the first rank.

    Args:
        model: A Transformer, LanguageModel, EncoderDecoder or Classifier, or a transformers model of `longspan.hf`.
        group: A process group, or a device mesh of one dimension, such as ``mesh["cp"]``.

    Returns:
        A `ContextParallel`; of a model of `longspan.hf` one that takes and returns what that model does.

    Raises:
        ValueError: On every rank, if the ranks have different models or configurations.
    """
    divided = getattr(type(model), "context_parallel_type", ContextParallel)(model, group)
    _check_same(divided.model, divided.group)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=divided.group, group_src=0)
    return divided


def as_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a device mesh of one dimension; a process group as it is."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f'context parallelism takes a mesh of one dimension, such as mesh["cp"], got {group}')
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group or a device mesh of one dimension, got {group!r}")
    return group


def _check_same(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank unless all have the same configuration and tensors of the same shapes."""
    tensors = {name: (tuple(x.shape), str(x.dtype)) for name, x in model.state_dict(keep_vars=True).items()}
    parts = {
        "configurations": [repr(part.config) for part in model.modules() if isinstance(part, Transformer)],
        "parameters": sorted(tensors.items()),
    }
    device = next(model.parameters()).device
    own = torch.tensor([zlib.crc32(repr(part).encode()) for part in parts.values()], device=device)
    for name, sums in zip(parts, gather(own, group).T.tolist(), strict=True):
        if len(set(sums)) > 1:
            common = max(set(sums), key=sums.count)
            others = [rank for rank, number in enumerate(sums) if number != common]
            raise ValueError(
                f"the ranks have models with different {name}: ranks {others} differ from the others; build the same "
                "model on all of them"
            )
