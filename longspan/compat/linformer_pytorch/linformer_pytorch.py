"""Models of linformer-pytorch.

Sequences may be shorter than input_size. Masks are (B, n) bool, True for tokens to attend to: input_mask for the input,
embeddings_mask for the embeddings that a decoder attends to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.compat.compressed import zero_fill
from longspan.compat.faithful import resolve_faithful
from longspan.compat.layers import initialize_layers
from longspan.compat.linformer_pytorch.keys import language_model_keys, stack_keys
from longspan.compat.linformer_pytorch.layers import (
    FeedForward,
    LinearAttentionHead,
    MHAttention,
    PositionalEmbedding,
    ProjectInOut,
    Residual,
    draw_fixed_tables,
    gen_causal_mask,
    get_act,
    get_EF,
    identity,
)
from longspan.compat.linformer_pytorch.options import (
    EncoderDecoderOptions,
    LanguageModelOptions,
    LinformerOptions,
    options_with_prefix,
)
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModel, KeyMapping, with_prefix
from longspan.layout import TokenLayout
from longspan.models.transformer import EncoderDecoder, LanguageModel, Transformer

# `import *` from the original also gives what it imports.
__all__ = [
    "F",
    "FeedForward",
    "LinearAttentionHead",
    "Linformer",
    "LinformerEncDec",
    "LinformerLM",
    "MHAttention",
    "PositionalEmbedding",
    "ProjectInOut",
    "Residual",
    "checkpoint",
    "gen_causal_mask",
    "get_EF",
    "get_act",
    "identity",
    "nn",
    "torch",
]

_LINFORMER_POSITIONAL = (
    "input_size channels dim_k dim_ff dim_d dropout_ff nhead depth dropout activation checkpoint_level "
    "parameter_sharing k_reduce_by_layer full_attention include_ff w_o_intermediate_dim decoder_mode causal method "
    "ff_intermediate"
)
_LM_POSITIONAL = (
    "num_tokens input_size channels dim_k dim_ff dim_d dropout_ff dropout_tokens nhead depth ff_intermediate dropout "
    "activation checkpoint_level parameter_sharing k_reduce_by_layer full_attention include_ff w_o_intermediate_dim "
    "emb_dim return_emb decoder_mode causal method"
)
_ENC_DEC_POSITIONAL = (
    "enc_num_tokens enc_input_size enc_channels dec_num_tokens dec_input_size dec_channels enc_dim_k enc_dim_ff "
    "enc_dim_d enc_ff_intermediate dec_ff_intermediate enc_dropout_ff enc_nhead enc_depth enc_dropout "
    "enc_parameter_sharing enc_k_reduce_by_layer enc_full_attention enc_include_ff enc_w_o_intermediate_dim "
    "enc_emb_dim enc_method dec_dim_k dec_dim_ff dec_dim_d dec_dropout_ff dec_nhead dec_depth dec_dropout "
    "dec_parameter_sharing dec_k_reduce_by_layer dec_full_attention dec_include_ff dec_w_o_intermediate_dim "
    "dec_emb_dim dec_method activation checkpoint_level"
)


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that were given, so that layers put in place of others need not take them all."""
    return {name: value for name, value in arguments.items() if value is not None and value is not False}


def _is_self_attention(layer: nn.Module) -> bool:
    attention = getattr(layer, "fn", None)
    return isinstance(attention, MHAttention) and not attention.decoder_mode


class Linformer(CompatModel):
    """Transformer of Linformer attention for vectors, (B, n, channels) -> (B, n, channels).

    Args:
        use_pos_emb: Add sinusoidal positions to the input.
        faithful: Compute as the original does: causal masks hide compressed keys, input_mask and embeddings_mask set
            keys and queries to zero, a causal decoder masks its embeddings, and k_reduce_by_layer has no effect with
            layerwise sharing.
    """

    faithful = False  # in models that were pickled by the original

    @init_from(LinformerOptions, _LINFORMER_POSITIONAL)
    def __init__(self, options: LinformerOptions) -> None:
        super().__init__()
        self.options = replace(options, faithful=resolve_faithful(options.faithful))
        self.input_size, self.channels, self.depth = options.input_size, options.channels, options.depth
        self.nhead, self.decoder_mode = options.nhead, options.decoder_mode
        self.checkpoint_level = options.checkpoint_level
        self.faithful = bool(self.options.faithful)
        if options.use_pos_emb:
            self.pos_emb = PositionalEmbedding(options.channels, faithful=self.faithful)
        self.seq = self._new_layers()
        self.record_structure()

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Apply all layers.

        Args:
            tensor: Vectors (B, n, channels).
            input_mask: (B, n), True for tokens to attend to.
            embeddings: (B, m, channels), with decoder_mode.
            embeddings_mask: (B, m), True for embeddings to attend to.
            visualize: Whether heads store their attention weights for `Visualizer`.
        """
        if not self.decoder_mode and (embeddings is not None or (embeddings_mask is not None and not self.faithful)):
            raise ValueError("embeddings are for a decoder: build it with decoder_mode=True")
        if self.decoder_mode and embeddings is None:
            raise ValueError("a decoder attends to embeddings: pass embeddings=, of shape (B, m, channels)")
        if tensor.ndim != 3 or tensor.shape[2] != self.channels:
            raise ValueError(f"tensor must be (B, n, channels={self.channels}), got {tuple(tensor.shape)}")
        if getattr(self, "pos_emb", None) is not None:
            tensor = tensor + self.pos_emb(tensor).to(tensor.dtype)
        if not self.faithful:
            tensor = zero_fill(tensor, input_mask)
        arguments = _given(
            input_mask=input_mask, embeddings=embeddings, embeddings_mask=embeddings_mask, visualize=visualize
        )
        for layer in self.seq:
            given = arguments
            if self.decoder_mode and not self.faithful and _is_self_attention(layer):
                given = {name: value for name, value in arguments.items() if not name.startswith("embeddings")}
            if self.checkpoint_level != "C0" and torch.is_grad_enabled():
                tensor = checkpoint(layer, tensor, use_reentrant=False, **given)
            else:
                tensor = layer(tensor, **given)
        return tensor

    def _new_layers(self) -> nn.ModuleList:
        options = self.options
        shared = None
        if options.layerwise:
            shared = get_EF(options.input_size, options.dim_k, options.method, options.head_dim)
        masks: dict[int, Tensor] = {}

        def attention(channels: int, layer: int, cross: bool) -> MHAttention:
            rank, mask = options.rank(layer), None
            # The original masks the embeddings of a causal decoder, and not its own tokens.
            if options.causal and (not cross if not self.faithful else cross or not options.decoder_mode):
                width = options.dim_k if self.faithful else rank
                mask = masks.setdefault(width, gen_causal_mask(options.input_size, width, options.full_attention))
            return MHAttention(
                *(options.input_size, options.head_dim, channels, rank, options.nhead, options.dropout),
                options.checkpoint_level,
                "kv" if options.reduces_shared_rank else options.parameter_sharing,
                *(shared, shared, options.full_attention, mask, options.w_o_intermediate_dim),
                decoder_mode=cross,
                method=options.method,
                faithful=self.faithful,
            )

        layers, attentions = nn.ModuleList(), []
        outputs: list[tuple[nn.Module, nn.Linear]] = []
        for i in range(options.depth):
            inner = channels_in = channels_out = options.channels
            if options.ff_intermediate is not None:
                inner = options.ff_intermediate
                channels_in = inner if i > 0 else options.channels
                channels_out = inner if i < options.depth - 1 else options.channels
            for cross in (False, True) if options.decoder_mode else (False,):
                attend = attention(channels_in, i, cross)
                layers.append(Residual(attend, channels_in, channels_in))
                outputs.append((attend, attend.w_out))
                attentions.append(attend)
                if options.include_ff:
                    sizes = channels_in, channels_out, options.dim_ff
                    feed_forward = FeedForward(*sizes, options.dropout_ff, options.activation)
                    layers.append(Residual(feed_forward, channels_in, channels_out))
                    outputs.append((feed_forward, feed_forward.w_2))
        initialize_layers(outputs)
        if options.method == "no_params" and not self.faithful:
            draw_fixed_tables(attentions)
        return layers

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        options = self.options.adapt(shapes)
        if options != self.options:
            self.options, parameter = options, next(self.parameters())
            self.seq = self._new_layers().to(parameter.device, parameter.dtype).train(self.training)
            self.record_structure()

    def longspan_model(self) -> Transformer:
        if self.options.use_pos_emb:
            raise ValueError("cannot convert this Linformer: use_pos_emb adds positions before the model")
        _refuse_faithful(self)
        model = Transformer(self.options.config())
        self.options.share_projection(model)
        return model

    def key_mappings(self) -> Iterable[KeyMapping]:
        with torch.device("meta"):
            model = self.longspan_model()
        return stack_keys(self, model)


class LinformerLM(CompatModel):
    """Language model of Linformer attention: tokens (B, n) -> logits (B, n, num_tokens).

    With return_emb it returns hidden states (B, n, emb_dim). faithful: See `Linformer`.
    """

    faithful = causal = False  # in models that were pickled by the original

    @init_from(LanguageModelOptions, _LM_POSITIONAL)
    def __init__(self, options: LanguageModelOptions) -> None:
        super().__init__()
        self.options = options = replace(options, faithful=resolve_faithful(options.faithful))
        self.faithful, self.causal, self.input_size = bool(options.faithful), options.causal, options.input_size
        self.decoder_mode, self.return_emb = options.decoder_mode, options.return_emb
        width = options.channels if options.emb_dim is None else options.emb_dim
        self.to_token_emb = nn.Embedding(options.num_tokens, width)
        nn.init.normal_(self.to_token_emb.weight, std=0.02)
        self.pos_emb = PositionalEmbedding(width, faithful=self.faithful)
        names = [field.name for field in fields(LinformerOptions) if not field.name.startswith("_")]
        body = Linformer(**{name: getattr(options, name) for name in names if hasattr(options, name)})
        self.linformer = body if width == options.channels else ProjectInOut(body, width, options.channels)
        self.to_logits = identity if options.return_emb else nn.Linear(width, options.num_tokens)
        self.dropout_tokens = nn.Dropout(options.dropout_tokens)
        self.record_structure()

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Return the logits of tokens (B, n), or their hidden states; other arguments as for `Linformer`."""
        x = self.to_token_emb(tensor)
        positions = self.pos_emb(x)
        if self.causal and input_mask is not None and not self.faithful:
            # Left padding takes no positions.
            positions = positions[0][TokenLayout.of(tensor, causal=True, key_mask=input_mask).position]
        x = self.dropout_tokens(x + positions.to(x.dtype))
        arguments = _given(
            input_mask=input_mask, embeddings=embeddings, embeddings_mask=embeddings_mask, visualize=visualize
        )
        return self.to_logits(self.linformer(x, **arguments))

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        prefix, body = next((name, m) for name, m in self.named_modules() if isinstance(m, Linformer))
        body.adapt_to_checkpoint({key: shape for key, shape in shapes.items() if key.startswith(prefix)})
        if body.options._constant_rank != self.options._constant_rank:
            self.options = replace(self.options, _constant_rank=body.options._constant_rank)
            self.record_structure("linformer")

    def longspan_model(self) -> LanguageModel:
        _refuse_faithful(self)
        model = LanguageModel(self.options.config())
        self.options.share_projection(model.transformer)
        return model

    def key_mappings(self) -> Iterable[KeyMapping]:
        with torch.device("meta"):
            model = self.longspan_model()
        return language_model_keys(self, model)


class LinformerEncDec(CompatModel):
    """Encoder-decoder model: source (B, m) and target (B, n) tokens -> logits (B, n, dec_num_tokens).

    faithful: See `Linformer`; the decoder then attends to all of the source, whatever the mask.
    """

    faithful = False  # in models that were pickled by the original

    @init_from(EncoderDecoderOptions, _ENC_DEC_POSITIONAL)
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.faithful = resolve_faithful(options.faithful)
        sides = [options_with_prefix(options, prefix) for prefix in ("enc_", "dec_")]
        names = [field.name for field in fields(LanguageModelOptions) if not field.name.startswith("_")]
        self.encoder, self.decoder = (
            LinformerLM(**{name: getattr(side, name) for name in names} | {"faithful": self.faithful}) for side in sides
        )
        self.record_structure()

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, input_mask: Tensor | None = None, visualize: bool = False
    ) -> Tensor:
        """Return the logits of y (B, n), by default x, given x (B, m). input_mask: (B, m)."""
        seen = _given(visualize=visualize)
        embeddings = self.encoder(x, **_given(input_mask=input_mask), **seen)
        mask = {} if self.faithful else _given(embeddings_mask=input_mask)
        return self.decoder(x if y is None else y, embeddings=embeddings, **mask, **seen)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        for name, side in (("encoder.", self.encoder), ("decoder.", self.decoder)):
            own, before = {key.removeprefix(name): x for key, x in shapes.items() if key.startswith(name)}, side.options
            side.adapt_to_checkpoint(own)
            if side.options != before:
                self.record_structure(f"{name}linformer")

    def longspan_model(self) -> EncoderDecoder:
        _refuse_faithful(self)
        sides = self.encoder.options, self.decoder.options
        # No token is padding; a mask hides tokens.
        model = EncoderDecoder(*(side.config() for side in sides), pad_token=-1)
        for side, own in zip(sides, (model.encoder, model.decoder), strict=True):
            side.share_projection(own.transformer)
        return model

    def key_mappings(self) -> Iterable[KeyMapping]:
        for name, side in (("encoder.", self.encoder), ("decoder.", self.decoder)):
            yield from with_prefix(side.key_mappings(), name, name)


def _refuse_faithful(net: Linformer | LinformerLM | LinformerEncDec) -> None:
    if net.faithful:
        raise ValueError(
            f"cannot convert this {type(net).__name__}: faithful=True keeps what no longspan model does, such as masks "
            "that hide compressed keys; build it without, and load the same state dict"
        )
