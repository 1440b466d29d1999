"""The models of linformer-pytorch, and the layers that people take out of them.

Sequences may be shorter than input_size. Masks are (B, n) bool, True = keep: input_mask says which of the tokens are
real, embeddings_mask which of the embeddings that a decoder attends to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.linformer_pytorch.keys import BASE, frequencies, language_model_entries, stack_entries
from longspan.compat.linformer_pytorch.layers import (
    FeedForward,
    LinearAttentionHead,
    MHAttention,
    PositionalEmbedding,
    gen_causal_mask,
    get_EF,
)
from longspan.compat.linformer_pytorch.options import Options
from longspan.compat.state_dict import CompatModule, KeyMapping, constant
from longspan.models.positions import SinusoidalPositions
from longspan.models.transformer import EncoderDecoder, LanguageModel, Transformer

__all__ = [
    "FeedForward",
    "LinearAttentionHead",
    "Linformer",
    "LinformerEncDec",
    "LinformerLM",
    "MHAttention",
    "PositionalEmbedding",
    "gen_causal_mask",
    "get_EF",
]


class Linformer(CompatModule):
    """Vectors in, vectors out: (B, n, channels) -> (B, n, channels).

    use_pos_emb: sinusoidal positions are added to the input.
    """

    model: Transformer

    def __init__(
        self,
        input_size: int,
        channels: int,
        dim_k: int,
        dim_ff: int = 256,
        dim_d: int | None = None,
        dropout_ff: float = 0.15,
        nhead: int = 4,
        depth: int = 1,
        dropout: float = 0.1,
        activation: str = "gelu",
        checkpoint_level: str = "C0",
        parameter_sharing: str = "layerwise",
        k_reduce_by_layer: int = 0,
        full_attention: bool = False,
        include_ff: bool = True,
        w_o_intermediate_dim: int | None = None,
        decoder_mode: bool = False,
        causal: bool = False,
        method: str = "learnable",
        ff_intermediate: int | None = None,
        *,
        use_pos_emb: bool = False,
    ) -> None:
        super().__init__()
        self.options = Options(
            input_size=input_size,
            channels=channels,
            dim_k=dim_k,
            dim_ff=dim_ff,
            dim_d=dim_d,
            dropout_ff=dropout_ff,
            nhead=nhead,
            depth=depth,
            dropout=dropout,
            activation=activation,
            checkpoint_level=checkpoint_level,
            parameter_sharing=parameter_sharing,
            k_reduce_by_layer=k_reduce_by_layer,
            full_attention=full_attention,
            include_ff=include_ff,
            w_o_intermediate_dim=w_o_intermediate_dim,
            decoder_mode=decoder_mode,
            causal=causal,
            method=method,
            ff_intermediate=ff_intermediate,
        )
        self.input_size, self.channels, self.depth, self.nhead = input_size, channels, depth, nhead
        self.decoder_mode, self.checkpoint_level = decoder_mode, checkpoint_level
        self.pos_emb = SinusoidalPositions(channels, BASE) if use_pos_emb else None
        self.not_in_model = "use_pos_emb adds positions before the model" if use_pos_emb else ""
        self.last_seen: dict[str, Any] | None = None
        self._build()

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """tensor: (B, n, channels). embeddings: (B, m, channels), with decoder_mode. visualize: for `Visualizer`."""
        how = _arguments(self, input_mask, embeddings, embeddings_mask)
        if self.pos_emb is not None:
            tensor = tensor + self.pos_emb(torch.arange(tensor.shape[1], device=tensor.device)[None]).to(tensor.dtype)
        if visualize:
            self.last_seen = {"x": tensor.detach(), **how}
        return self.model(tensor, **how)

    def key_mappings(self) -> Iterable[KeyMapping]:
        if self.pos_emb is not None:
            yield constant("pos_emb.inv_freq", lambda: frequencies(self.channels))
        yield from stack_entries(self.model, self.unused, "", "", "unused.")

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        flat = _flat(self.options, shapes)
        if flat != self.options:
            self.options = flat
            _rebuild(self)

    def _build(self) -> None:
        self.model = Transformer(self.options.config())
        self.unused = self.options.finish(self.model)


class LinformerLM(CompatModule):
    """Tokens in, logits out: (B, n) -> (B, n, num_tokens); with return_emb vectors, (B, n, emb_dim)."""

    model: LanguageModel

    def __init__(
        self,
        num_tokens: int,
        input_size: int,
        channels: int,
        dim_k: int = 64,
        dim_ff: int = 1024,
        dim_d: int | None = None,
        dropout_ff: float = 0.1,
        dropout_tokens: float = 0.1,
        nhead: int = 4,
        depth: int = 2,
        ff_intermediate: int | None = None,
        dropout: float = 0.05,
        activation: str = "gelu",
        checkpoint_level: str = "C0",
        parameter_sharing: str = "layerwise",
        k_reduce_by_layer: int = 0,
        full_attention: bool = False,
        include_ff: bool = True,
        w_o_intermediate_dim: int | None = None,
        emb_dim: int | None = None,
        return_emb: bool = False,
        decoder_mode: bool = False,
        causal: bool = False,
        method: str = "learnable",
    ) -> None:
        super().__init__()
        self.options = Options(
            input_size=input_size,
            channels=channels,
            dim_k=dim_k,
            dim_ff=dim_ff,
            dim_d=dim_d,
            dropout_ff=dropout_ff,
            nhead=nhead,
            depth=depth,
            dropout=dropout,
            activation=activation,
            checkpoint_level=checkpoint_level,
            parameter_sharing=parameter_sharing,
            k_reduce_by_layer=k_reduce_by_layer,
            full_attention=full_attention,
            include_ff=include_ff,
            w_o_intermediate_dim=w_o_intermediate_dim,
            decoder_mode=decoder_mode,
            causal=causal,
            method=method,
            ff_intermediate=ff_intermediate,
        )
        self.input_size, self.decoder_mode, self.return_emb = input_size, decoder_mode, return_emb
        # Without logits there is no matrix for them: as where they are tied to the embedding.
        self.fields = _tokens(num_tokens, emb_dim, dropout_tokens) | {"tie_embeddings": return_emb}
        self.last_seen: dict[str, Any] | None = None
        self._build()

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """tensor: (B, n) tokens; the rest as for `Linformer`."""
        how = _arguments(self, input_mask, embeddings, embeddings_mask)
        if visualize:
            self.last_seen = {"tokens": tensor, **how}
        hidden = self.model.hidden(tensor, **how)
        if not self.return_emb:
            return self.model.logits(hidden)
        return hidden if self.model.from_dim is None else self.model.from_dim(hidden)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return language_model_entries(self.model, self.unused, "", "", "unused.")

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        flat = _flat(self.options, shapes)
        if flat != self.options:
            self.options = flat
            _rebuild(self)

    def _build(self) -> None:
        self.model = LanguageModel(self.options.config(**self.fields))
        self.unused = self.options.finish(self.model.transformer)


class LinformerEncDec(CompatModule):
    """A source read both ways, and the logits of a target, each token from those before it: (B, n, dec_num_tokens)."""

    model: EncoderDecoder

    def __init__(
        self,
        enc_num_tokens: int,
        enc_input_size: int,
        enc_channels: int,
        dec_num_tokens: int,
        dec_input_size: int,
        dec_channels: int,
        enc_dim_k: int = 64,
        enc_dim_ff: int = 1024,
        enc_dim_d: int | None = None,
        enc_ff_intermediate: int | None = None,
        dec_ff_intermediate: int | None = None,
        enc_dropout_ff: float = 0.1,
        enc_nhead: int = 4,
        enc_depth: int = 2,
        enc_dropout: float = 0.05,
        enc_parameter_sharing: str = "layerwise",
        enc_k_reduce_by_layer: int = 0,
        enc_full_attention: bool = False,
        enc_include_ff: bool = True,
        enc_w_o_intermediate_dim: int | None = None,
        enc_emb_dim: int | None = None,
        enc_method: str = "learnable",
        dec_dim_k: int = 64,
        dec_dim_ff: int = 1024,
        dec_dim_d: int | None = None,
        dec_dropout_ff: float = 0.1,
        dec_nhead: int = 4,
        dec_depth: int = 2,
        dec_dropout: float = 0.05,
        dec_parameter_sharing: str = "layerwise",
        dec_k_reduce_by_layer: int = 0,
        dec_full_attention: bool = False,
        dec_include_ff: bool = True,
        dec_w_o_intermediate_dim: int | None = None,
        dec_emb_dim: int | None = None,
        dec_method: str = "learnable",
        activation: str = "gelu",
        checkpoint_level: str = "C0",
    ) -> None:
        super().__init__()
        self.encoder_options = Options(
            input_size=enc_input_size,
            channels=enc_channels,
            dim_k=enc_dim_k,
            dim_ff=enc_dim_ff,
            dim_d=enc_dim_d,
            dropout_ff=enc_dropout_ff,
            nhead=enc_nhead,
            depth=enc_depth,
            dropout=enc_dropout,
            activation=activation,
            checkpoint_level=checkpoint_level,
            parameter_sharing=enc_parameter_sharing,
            k_reduce_by_layer=enc_k_reduce_by_layer,
            full_attention=enc_full_attention,
            include_ff=enc_include_ff,
            w_o_intermediate_dim=enc_w_o_intermediate_dim,
            decoder_mode=False,
            causal=False,
            method=enc_method,
            ff_intermediate=enc_ff_intermediate,
        )
        self.decoder_options = Options(
            input_size=dec_input_size,
            channels=dec_channels,
            dim_k=dec_dim_k,
            dim_ff=dec_dim_ff,
            dim_d=dec_dim_d,
            dropout_ff=dec_dropout_ff,
            nhead=dec_nhead,
            depth=dec_depth,
            dropout=dec_dropout,
            activation=activation,
            checkpoint_level=checkpoint_level,
            parameter_sharing=dec_parameter_sharing,
            k_reduce_by_layer=dec_k_reduce_by_layer,
            full_attention=dec_full_attention,
            include_ff=dec_include_ff,
            w_o_intermediate_dim=dec_w_o_intermediate_dim,
            decoder_mode=True,
            causal=True,
            method=dec_method,
            ff_intermediate=dec_ff_intermediate,
        )
        self.tokens = _tokens(enc_num_tokens, enc_emb_dim, 0.1), _tokens(dec_num_tokens, dec_emb_dim, 0.1)
        self._build()

    def forward(self, x: Tensor, y: Tensor | None = None, *, input_mask: Tensor | None = None) -> Tensor:
        """x: (B, m) tokens, input_mask which of them are real. y: (B, n) tokens, x itself unless given."""
        y = x if y is None else y
        seen = torch.ones_like(x, dtype=torch.bool) if input_mask is None else input_mask
        context, _ = self.model.encode(x, seen)
        return self.model.decoder(y, context=context, context_mask=input_mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        assert isinstance(self.unused, nn.ModuleDict)
        for name, model in (("encoder", self.model.encoder), ("decoder", self.model.decoder)):
            idle = dict(self.unused.items()).get(name)
            yield from language_model_entries(model, idle, f"{name}.", f"{name}.", f"unused.{name}.")

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        encoder, decoder = (
            _flat(options, {name: shape for name, shape in shapes.items() if name.startswith(side)})
            for side, options in (("encoder.", self.encoder_options), ("decoder.", self.decoder_options))
        )
        if (encoder, decoder) != (self.encoder_options, self.decoder_options):
            self.encoder_options, self.decoder_options = encoder, decoder
            _rebuild(self)

    def _build(self) -> None:
        both = self.encoder_options, self.decoder_options
        configs = [options.config(**fields) for options, fields in zip(both, self.tokens, strict=True)]
        # No token is padding, unless a mask says so.
        self.model = EncoderDecoder(configs[0], configs[1], pad_token=-1)
        unused = {
            "encoder": self.encoder_options.finish(self.model.encoder.transformer),
            "decoder": self.decoder_options.finish(self.model.decoder.transformer),
        }
        self.unused = nn.ModuleDict({name: idle for name, idle in unused.items() if idle is not None})


def _tokens(number: int, emb_dim: int | None, dropout: float) -> dict[str, Any]:
    """The fields of a language model's configuration."""
    return {
        "vocab_size": number,
        "embed_dim": emb_dim,
        "embed_dropout": dropout,
        "positions": "sinusoidal",
    }


def _arguments(
    net: Linformer | LinformerLM, input_mask: Tensor | None, embeddings: Tensor | None, embeddings_mask: Tensor | None
) -> dict[str, Any]:
    """What our models are called with."""
    if not net.decoder_mode:
        if embeddings is not None or embeddings_mask is not None:
            raise ValueError("embeddings are for a decoder: build it with decoder_mode=True")
        return {"key_mask": input_mask}
    if embeddings is None:
        raise ValueError("a decoder attends to embeddings: pass embeddings=, of shape (B, m, channels)")
    return {"key_mask": input_mask, "context": embeddings, "context_mask": embeddings_mask}


def _flat(options: Options, shapes: Mapping[str, torch.Size]) -> Options:
    """The options that a checkpoint of these shapes was trained with."""
    found = {shape for name, shape in shapes.items() if name.endswith(".E.weight")}
    if not options.shrinks or options.depth == 1 or len(found) != 1:
        return options
    warnings.warn(
        "this checkpoint was trained without k_reduce_by_layer, which the original ignored with layerwise sharing: its "
        "shapes are kept, and the model is built to them",
        stacklevel=6,
    )
    return replace(options, flat=True)


def _rebuild(net: Linformer | LinformerLM | LinformerEncDec) -> None:
    like = next(net.model.parameters())
    net._build()
    net.to(like.device, like.dtype).train(net.training)
