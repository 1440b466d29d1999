"""Models built from a configuration: Transformer, LanguageModel, EncoderDecoder, Classifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import Packing, PaddedSpan, SequenceShard, TokenLayout, check_key_mask
from longspan.models.builder import build_stack
from longspan.models.config import OF_TOKENS, ModelConfig
from longspan.models.layers import NORMS, Attention, latest_tokens
from longspan.models.ngrams import NgramEmbedding
from longspan.models.positions import (
    AbsolutePositions,
    AxialPositions,
    LearnedPositions,
    SinusoidalPositions,
)
from longspan.models.residual import ResidualBranch, StackState
from longspan.ops.common.torch_private import is_exporting
from longspan.ops.decode import CurrentToken, fused_linear, module_function
from longspan.ops.loss import IGNORE_INDEX, cap_logits, cross_entropy
from longspan.protocol import StateOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Transformer(nn.Module):
    """Layers without an embedding: (B, T, dim) -> (B, T, dim)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        for name, default in OF_TOKENS.items():
            if config.vocab_size is None and (value := getattr(config, name)) != default:
                raise ValueError(
                    f"{name}={value!r} is for embeddings of tokens, and a model without vocab_size reads vectors: "
                    "leave it out"
                )
        self.config = config
        self.stack = build_stack(config)
        last = config.norm if config.final_norm is True else config.final_norm
        self.norm = NORMS[last](config.dim) if last else None
        if config.norm_eps is not None:
            for module in self.modules():
                if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                    module.eps = config.norm_eps

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_packing: Packing | None = None,
        _layout: TokenLayout | None = None,
        _context_layout: TokenLayout | None = None,
    ) -> Tensor:
        """Run x through all layers.

        Args:
            x: (B, T, dim) vectors.
            key_mask: (B, T) bool, True for real tokens.
            packing: Sequences concatenated in x.
            context: (B, S, dim), for a model with cross-attention.
            context_mask: (B, S) bool, True for real tokens of the context.
            context_packing: Sequences concatenated in the context.

        Returns:
            (B, T, dim), normalized.
        """
        _check_vectors(x, self.config.dim)
        if _layout is None:
            _layout = TokenLayout.of(x, causal=self.config.causal, key_mask=key_mask, packing=packing)
        self._redraw_features(_layout.shard)
        self._check_context(context, context_mask, context_packing)
        if context is not None and _context_layout is None:
            _context_layout = TokenLayout.of(context, causal=False, key_mask=context_mask, packing=context_packing)
        return self.normalize(self.stack(x, _layout, context, _context_layout))

    def new_state(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        start: Tensor | int | None = None,
        transition: bool = False,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> StackState:
        """Return an empty state for `batch_size` sequences.

        Args:
            batch_size: Number of rows.
            max_length: The most tokens it will ever hold, for mechanisms that store them all.
            start: The position of its first token, (B,) or one for all rows; 0 unless given.
            transition: Whether mechanisms also store what merging states needs; see `Mechanism.new_state`.
            context: (B, S, dim), written into the state once, for a model with cross-attention.
            context_mask: (B, S) bool, True for real tokens of the context.
            device: Where its tensors are; the model's device unless given.
            dtype: The dtype of the inputs; the model's unless given.
        """
        example = next(self.parameters())
        options: StateOptions = {"max_length": max_length, "start": start, "transition": transition}
        options["device"] = example.device if device is None else device
        options["dtype"] = example.dtype if dtype is None else dtype
        self._check_context(context, context_mask)
        state = self.stack.new_state(batch_size, **options)
        if context is None:
            return state
        branches = list(state.branches)
        for i, layer in self.stack.attention_layers():
            if layer.cross:
                inner = layer.write(branches[i].inner[0], context, key_mask=context_mask)
                branches[i] = replace(branches[i], inner=(inner,))
        return replace(state, branches=tuple(branches))

    def extend(
        self, x: Tensor, state: StackState, *, key_mask: Tensor | None = None, _layout: TokenLayout | None = None
    ) -> tuple[Tensor, StackState]:
        """Run new tokens x (B, T, dim) after those of the state; causal models only.

        Returns:
            (B, T, dim), normalized, and the state after these tokens.
        """
        _check_vectors(x, self.config.dim)
        if not isinstance(state, StackState):
            raise TypeError(f"state must be what new_state or extend returned, got a {type(state).__name__}")
        if not self.config.causal:
            raise ValueError("only a causal model can be extended: build it with causal=True")
        if _layout is not None or key_mask is None or x.shape[1] == 0:
            layout = TokenLayout.of(x, causal=True, start=state.end) if _layout is None else _layout
            out, state = self.stack.extend(x, layout, state)
            return self.normalize(out), state
        span = PaddedSpan.of(key_mask)
        (x,) = span.roll(x)
        layout = TokenLayout.of(x, causal=True, key_mask=span.filled, start=state.end)
        out, state = self.stack.extend(x, layout, state)
        return span.unroll(self.normalize(out)), state

    def _check_context(self, context: Tensor | None, *others: object) -> None:
        """Raise ValueError unless there is a context where the model attends to one, and nothing of one elsewhere."""
        if self.config.cross is None:
            if any(given is not None for given in (context, *others)):
                raise ValueError("a context was given, but this model has no cross-attention: set ModelConfig.cross")
        elif context is None:
            raise ValueError("this model attends to a context: pass context=, of shape (B, S, dim)")

    def normalize(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        return x if self.norm is None else self.norm(x)

    def _redraw_features(self, shard: SequenceShard | None) -> None:
        """Count a training forward, and redraw the random features that are due, alike on all ranks of a shard.

        Done here, before the first layer and outside anything that is recomputed.
        """
        if not self.training:
            return
        for _, layer in self.stack.attention_layers():
            for part in layer.mechanism.modules():
                if getattr(part, "redraw_interval", None) is not None:
                    before = part.draw
                    cast("Any", part).count_forward()
                    if shard is not None and part.draw != before:
                        shard.share(list(part.buffers()))


class ModelStateOptions(StateOptions, total=False):
    """The keyword arguments of `Transformer.new_state`."""

    context: Tensor | None
    context_mask: Tensor | None


class LanguageModel(nn.Module):
    """Tokens to logits: (B, T) int64 -> (B, T, vocab_size)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("a language model needs vocab_size, the number of tokens")
        self.config = config
        width = config.embed_dim or config.dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.ngrams = NgramEmbedding(width, config.ngrams, config.ngram_buckets) if config.ngrams else None
        self.positions = _positions(config, width)
        self.dropout = nn.Dropout(config.embed_dropout)
        self.to_dim = nn.Linear(width, config.dim) if width != config.dim else None
        self.transformer = Transformer(config)
        self.from_dim = nn.Linear(config.dim, width) if width != config.dim else None
        self.narrow_norm = NORMS[config.norm](width) if config.legacy.narrow_norm else None
        self.to_logits = None
        if not config.tie_embeddings:
            self.to_logits = nn.Linear(width, config.vocab_size, bias=config.legacy.logits_bias)

    def forward(
        self,
        tokens: Tensor,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_packing: Packing | None = None,
        _layout: TokenLayout | None = None,
        _context_layout: TokenLayout | None = None,
    ) -> Tensor:
        """Compute logits (B, T, vocab_size) of tokens (B, T); other arguments as for `Transformer.forward`."""
        given = key_mask, packing, context, context_mask, context_packing, _layout, _context_layout
        return self.logits(self._hidden(tokens, *given))

    def hidden(
        self,
        tokens: Tensor,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_packing: Packing | None = None,
        _layout: TokenLayout | None = None,
    ) -> Tensor:
        """Compute the last layer's vectors (B, T, dim), normalized; arguments as for `forward`."""
        return self._hidden(tokens, key_mask, packing, context, context_mask, context_packing, _layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits (B, T, vocab_size) of vectors (B, T, dim) from `hidden`."""
        narrow = self._narrow(hidden)
        logits = F.linear(narrow, self.embedding.weight) if self.to_logits is None else self.to_logits(narrow)
        return cap_logits(logits, self.config.logit_softcap)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_packing: Packing | None = None,
        _layout: TokenLayout | None = None,
        _context_layout: TokenLayout | None = None,
    ) -> Tensor:
        """Compute the mean cross-entropy of labels without storing all logits at once.

        Args:
            tokens: (B, T) int64.
            labels: (B, T) int64, −100 where a label does not count. By default the next token of the same sequence,
                where both are real tokens.
            key_mask: (B, T) bool, True for real tokens.
            packing: Sequences concatenated in tokens.
            context: (B, S, dim), for a model with cross-attention.
            context_mask: (B, S) bool, True for real tokens of the context.
            context_packing: Sequences concatenated in the context.
        """
        _check_tokens(tokens)
        if labels is None:
            labels = _next_tokens(tokens, key_mask, packing)
        else:
            self._check_labels(labels, tokens)
        given = key_mask, packing, context, context_mask, context_packing, _layout, _context_layout
        return self.hidden_loss(self._hidden(tokens, *given), labels)

    def hidden_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean cross-entropy of labels (B, T) from vectors (B, T, dim) of `hidden` or `extend_hidden`."""
        narrow = self._narrow(hidden)
        weight = self.embedding.weight if self.to_logits is None else self.to_logits.weight
        bias = None if self.to_logits is None else self.to_logits.bias
        return cross_entropy(narrow.flatten(0, 1), weight, bias, labels.flatten(), self.config.logit_softcap)

    def _narrow(self, hidden: Tensor) -> Tensor:
        """Project vectors (B, T, dim) to the width of the embeddings."""
        narrow = hidden if self.from_dim is None else self.from_dim(hidden)
        return narrow if self.narrow_norm is None else self.narrow_norm(narrow)

    def new_state(self, batch_size: int, **options: Unpack[ModelStateOptions]) -> StackState:
        """Return an empty state; see `Transformer.new_state`."""
        longest = options.get("max_length")
        if longest is not None and self.positions is not None:
            self.positions.check(longest)
        state = self.transformer.new_state(batch_size, **options)
        if self.ngrams is None:
            return state
        recent = torch.zeros(batch_size, self.ngrams.reach, 1, dtype=torch.int64, device=state.length.device)
        return replace(state, recent=recent)

    def extend(
        self, tokens: Tensor, state: StackState, *, key_mask: Tensor | None = None, _layout: TokenLayout | None = None
    ) -> tuple[Tensor, StackState]:
        """Compute logits (B, T, vocab_size) of new tokens (B, T) after those of the state, and the state after them."""
        hidden, state = self.extend_hidden(tokens, state, key_mask=key_mask, _layout=_layout)
        return self.logits(hidden), state

    def extend_hidden(
        self, tokens: Tensor, state: StackState, *, key_mask: Tensor | None = None, _layout: TokenLayout | None = None
    ) -> tuple[Tensor, StackState]:
        """Extend as `extend` does, but return the last layer's vectors (B, T, dim) in place of logits."""
        _check_tokens(tokens)
        if not isinstance(state, StackState):
            raise TypeError(f"state must be what new_state or extend returned, got a {type(state).__name__}")
        if len(tokens) != len(state.length):
            raise ValueError(
                f"the state holds {len(state.length)} sequences, the input {len(tokens)}: tokens need a row for each"
            )
        span = None
        if self._embeds_inside and key_mask is not None and _layout is None and tokens.shape[1]:
            span = PaddedSpan.of(key_mask)
            (tokens,), key_mask = span.roll(tokens), span.filled
        layout = _layout
        if layout is None:
            layout = TokenLayout.of(tokens, causal=True, key_mask=key_mask, start=state.end)
        longest = 0
        limited = self.positions is not None and self.positions.reach is not None
        if limited and tokens.device.type == "cpu" and not is_exporting():
            longest = int(layout.position.max()) + 1 if layout.position.numel() else 0
        x, recent = self._embed(tokens, layout, longest, state.recent)
        if self._embeds_inside:
            _layout = replace(layout, tokens=tokens)
        out, state = self.transformer.extend(x, state, key_mask=key_mask, _layout=_layout)
        out = out if span is None else span.unroll(out)
        return out, state if recent is None else replace(state, recent=recent)

    def decode_step(self, tokens: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        """Compute logits (B, V) of one token (B,) of a decode loop, unchecked, without gradients, updating the state.

        All lengths in the state must be one tensor (`Stack.share_length`), which is advanced here.
        """
        if self.ngrams is None:
            x = self.embedding(tokens)[:, None]
        else:
            assert state.recent is not None
            x = self.ngrams.step(tokens, state.recent, self.embedding)[:, None]
        if self.positions is not None:
            x = x + self.positions(state.length[:, None]).to(x.dtype)
        x = x if self.to_dim is None else self.to_dim(x)
        out, state = self.transformer.stack.decode_step(x, state, tokens[:, None])
        state.length.add_(1)
        if self.from_dim is not None or self.narrow_norm is not None:
            return self.logits(self.transformer.normalize(out))[:, 0], state
        last = self.embedding.weight if self.to_logits is None else self.to_logits
        logits = fused_linear(out, last, norm=self.transformer.norm)[0][:, 0]
        return cap_logits(logits, self.config.logit_softcap), state

    def decode_function(self, state: StackState) -> Callable[[Tensor], Tensor] | None:
        """Return a function as fast as `decode_step` can be on a CPU: from one token (1,) to logits (1, V).

        What stays the same between tokens is looked up here: layers replaced and hooks registered later have no effect.
        Each call updates and advances the state in place.

        Returns:
            The function, or None where only `decode_step` will do: several sequences, half precision, a state that
            grows, options that the layers have no such function for.
        """
        dtype = self.embedding.weight.dtype
        held = {x.dtype for x in state.tensors().values() if x.is_floating_point()}
        run = None
        if dtype in (torch.float32, torch.float64) and held <= {dtype}:
            run = self.transformer.stack.decode_function(state)
        if run is None or self.from_dim is not None or self.narrow_norm is not None:
            return None
        layers = self.to_dim, self.transformer.norm, self.to_logits
        to_dim, norm, to_logits = (layer and module_function(layer) for layer in layers)
        embedding, length, recent, stack = self.embedding, state.length, state.recent, run
        ngrams, positions, softcap = self.ngrams, self.positions, self.config.logit_softcap

        def step(token: Tensor) -> Tensor:
            x = embedding(token) if ngrams is None or recent is None else ngrams.step(token, recent, embedding)
            if positions is not None:
                x = x + positions(length[:, None])[:, 0].to(dtype)
            x = stack(x if to_dim is None else to_dim(x), CurrentToken(token, int(length), dtype))
            length.add_(1)
            x = x if norm is None else norm(x)
            return cap_logits(F.linear(x, embedding.weight) if to_logits is None else to_logits(x), softcap)

        return step

    def check_length(self, length: int) -> None:
        """Raise ValueError if a table of positions or of a projection does not cover sequences of `length` tokens."""
        if self.positions is not None:
            self.positions.check(length)
        for branch in self.transformer.stack.branches:
            if isinstance(branch, ResidualBranch) and isinstance(branch.layer, Attention) and not branch.layer.cross:
                branch.layer.mechanism.check_length(-(-length // branch.stride))

    def state_size(self) -> int:
        """Return the bytes of one sequence's state; for `softmax`, which stores every token, of an empty one."""
        context = None
        if self.config.cross is not None:
            context = next(self.parameters()).new_zeros(1, 1, self.config.dim)
        state = self.new_state(1, context=context)
        return sum(x.numel() * x.element_size() for x in state.tensors().values())

    def _hidden(
        self,
        tokens: Tensor,
        key_mask: Tensor | None,
        packing: Packing | None,
        context: Tensor | None,
        context_mask: Tensor | None,
        context_packing: Packing | None,
        layout: TokenLayout | None = None,
        context_layout: TokenLayout | None = None,
    ) -> Tensor:
        _check_tokens(tokens)
        if layout is None and key_mask is None and packing is None:
            position = torch.arange(tokens.shape[1], device=tokens.device)[None]
            layout = TokenLayout(position, torch.full_like(position, tokens.shape[1] - 1))
        elif layout is None:
            layout = TokenLayout.of(tokens, causal=self.config.causal, key_mask=key_mask, packing=packing)
        longest = tokens.shape[1] if packing is None else packing.max_length
        if layout.shard is not None and layout.last.numel():
            longest = int(layout.last.max()) + 1
        reach = None if self.positions is None else self.positions.reach
        if reach is not None and longest > reach and key_mask is not None:
            longest = int(layout.position.max()) + 1  # padding has no position
        given: dict[str, Any] = {"context": context, "context_mask": context_mask, "context_packing": context_packing}
        if self.config.attention.value_embedding:
            layout = replace(layout, tokens=tokens)
        given |= {"_layout": layout, "_context_layout": context_layout}
        return self.transformer(self._embed(tokens, layout, longest)[0], **given)

    @property
    def _embeds_inside(self) -> bool:
        """Whether more than the embedding of each token depends on the tokens, so that they move with their vectors."""
        return self.ngrams is not None or self.config.attention.value_embedding

    def _look_up(self, tokens: Tensor) -> Tensor:
        try:
            return self.embedding(tokens)
        except IndexError:  # On a GPU the kernel ends the process.
            low, high, size = int(tokens.min()), int(tokens.max()), len(self.embedding.weight)
            raise ValueError(f"tokens must be from 0 to {size - 1}, got {low} to {high}") from None

    def _check_labels(self, labels: Tensor, tokens: Tensor) -> None:
        if not isinstance(labels, Tensor):
            raise TypeError(f"labels must be a tensor of the tokens' shape, got a {type(labels).__name__}")
        if labels.shape != tokens.shape or labels.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"labels must be integers of the tokens' shape {tuple(tokens.shape)}, "
                f"got {tuple(labels.shape)} {labels.dtype}"
            )
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            vocab_size = len(self.embedding.weight)
            wrong = labels[((labels < 0) | (labels >= vocab_size)) & (labels != IGNORE_INDEX)]
            if len(wrong):
                raise ValueError(f"labels must be from 0 to {vocab_size - 1}, or {IGNORE_INDEX}, got {int(wrong[0])}")

    def _embed(
        self, tokens: Tensor, layout: TokenLayout, longest: int, recent: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of tokens, and the codes that n-grams need next, if those before were given."""
        x = self.embedding(tokens) if torch.compiler.is_compiling() else self._look_up(tokens)
        if self.ngrams is not None:
            codes = self.ngrams.encode(tokens, layout)
            x = x + self.ngrams(codes, layout, recent)
            recent = None if recent is None else latest_tokens(recent, codes, layout)
        if self.positions is not None:
            self.positions.check(longest)
            x = x + self.positions(layout.position).to(x.dtype)
        x = self.dropout(x)
        x = x if self.to_dim is None else self.to_dim(x)
        if not self.config.residual_in_fp32 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x, recent


class EncoderDecoder(nn.Module):
    """A bidirectional encoder of a source and a causal decoder of a target that attends to it.

    Args:
        encoder: Without causal and cross. Its dim or its embed_dim is the decoder's dim.
        decoder: With causal and cross.
        pad_token: Padding where no mask is given.
        tie_embeddings: Whether encoder and decoder share one embedding.
    """

    def __init__(self, encoder: ModelConfig, decoder: ModelConfig, *, pad_token: int = 0, tie_embeddings: bool = False):
        super().__init__()
        if encoder.causal or encoder.cross is not None:
            raise ValueError("the encoder must be bidirectional, without cross-attention")
        if not decoder.causal or decoder.cross is None:
            raise ValueError("the decoder must have causal=True and cross, its attention to the source")
        if decoder.dim not in (encoder.dim, encoder.embed_dim):
            raise ValueError(
                f"encoder and decoder must have one dim, got {encoder.dim} and {decoder.dim}; "
                "or give the encoder the decoder's dim as embed_dim"
            )
        self.encoder, self.decoder, self.pad_token = LanguageModel(encoder), LanguageModel(decoder), pad_token
        self.encoder.to_logits = self.encoder.narrow_norm = None
        if encoder.dim == decoder.dim:
            self.encoder.from_dim = None
        if tie_embeddings:
            if self.encoder.embedding.weight.shape != self.decoder.embedding.weight.shape:
                raise ValueError("tie_embeddings needs one vocab_size and one embed_dim for encoder and decoder")
            self.decoder.embedding = self.encoder.embedding

    def forward(
        self, source: Tensor, target: Tensor, *, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the mean cross-entropy of target (B, T) tokens 1 … T − 1 given those before them and source (B, S).

        Masks are True for real tokens; without one, pad_token is padding.
        """
        _check_tokens(target)
        target_mask = target != self.pad_token if target_mask is None else target_mask
        context, source_mask = self.encode(source, source_mask)
        if len(source) != len(target):
            raise ValueError(f"source and target must have as many rows, got {len(source)} and {len(target)}")
        labels = target[:, 1:].masked_fill(~(target_mask[:, 1:] & target_mask[:, :-1]), IGNORE_INDEX)
        mask = target_mask[:, :-1]
        return self.decoder.loss(target[:, :-1], labels, key_mask=mask, context=context, context_mask=source_mask)

    def encode(
        self, source: Tensor, source_mask: Tensor | None = None, *, _layout: TokenLayout | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the source's vectors (B, S, dim) and its mask."""
        _check_tokens(source)
        source_mask = source != self.pad_token if source_mask is None else source_mask
        vectors = self.encoder.hidden(source, key_mask=source_mask, _layout=_layout)
        return vectors if self.encoder.from_dim is None else self.encoder.from_dim(vectors), source_mask


class VectorProjection(nn.Module):
    """Vectors of a data set, normalized per feature and projected: (B, T, input_dim) -> (B, T, dim).

    Attributes:
        mean: (input_dim,), subtracted first.
        std: (input_dim,), the divisor.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(input_dim))
        self.register_buffer("std", torch.ones(input_dim))
        self.to_dim = nn.Linear(input_dim, dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Normalize and project x. key_mask: (B, T) bool, True for real tokens."""
        _check_vectors(x, len(self.mean))
        if key_mask is not None:  # NaN in padding would reach the gradients of the weights.
            check_key_mask(key_mask, x, None)
            x = x.masked_fill(~key_mask[..., None], 0)
        return self.to_dim((x - self.mean) / self.std)


class Classifier(nn.Module):
    """Sequence classification, regression and labelling.

    (B, T) tokens, (B, T, input_dim) vectors, or (B, T, dim) vectors without a vocabulary -> (B, num_classes); with
    `pooling="none"` (B, T, num_classes).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise ValueError("a classifier needs num_classes")
        self.config = config
        self.project = None if config.input_dim is None else VectorProjection(config.input_dim, config.dim)
        self.body = Transformer(config) if config.vocab_size is None else LanguageModel(config)
        if isinstance(self.body, LanguageModel):
            self.body.to_logits = self.body.from_dim = self.body.narrow_norm = None
        self.to_classes = nn.Linear(config.dim, config.num_classes)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Compute logits (B, num_classes) of the mean over real tokens, or with `pooling="none"` of each token."""
        x = x if self.project is None else self.project(x, key_mask)
        hidden = self.body.hidden if isinstance(self.body, LanguageModel) else self.body
        return self.logits(hidden(x, key_mask=key_mask), key_mask=key_mask)

    def logits(self, vectors: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Compute logits of the body's vectors (B, T, dim), as `forward` does."""
        if self.config.pooling == "none":
            return self.to_classes(vectors)
        if key_mask is None:
            return self.to_classes(vectors.sum(1) / max(vectors.shape[1], 1))
        total = vectors.masked_fill(~key_mask[..., None], 0).sum(1)
        return self.to_classes(total / key_mask.sum(1, keepdim=True).clamp(min=1))


def _check_vectors(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor (B, T, {dim}), got a {type(x).__name__}")
    if x.ndim != 3 or x.shape[2] != dim or not x.is_floating_point():
        raise ValueError(f"x must be (B, T, {dim}) floating point, got {tuple(x.shape)} {x.dtype}")


def _check_tokens(tokens: Tensor) -> None:
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor (B, T) of integers, got {tokens!r}")
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be (B, T) integers, got {tuple(tokens.shape)} {tokens.dtype}")


def _next_tokens(tokens: Tensor, key_mask: Tensor | None, packing: Packing | None) -> Tensor:
    """Return the token after each, −100 where there is none: (B, T)."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    if key_mask is not None:
        labels = labels.masked_fill(~(key_mask & F.pad(key_mask[:, 1:], (0, 1))), IGNORE_INDEX)
    if packing is not None:
        end = packing.bounds(tokens.shape[1])[1]
        last = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) == end
        labels = labels.masked_fill(last, IGNORE_INDEX)
    return labels


def _positions(config: ModelConfig, width: int) -> AbsolutePositions | None:
    if config.positions == "learned":
        assert config.max_length is not None
        return LearnedPositions(width, config.max_length)
    if config.positions == "sinusoidal":
        return SinusoidalPositions(width, config.legacy.position_base)
    if config.positions == "axial":
        assert config.axial_shape is not None
        return AxialPositions(width, config.axial_shape)
    return None
