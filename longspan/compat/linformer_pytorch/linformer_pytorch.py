"""Models of linformer-pytorch.

Sequences may be shorter than input_size. Masks are (B, n) bool, True for tokens to attend to: input_mask for the input,
embeddings_mask for the embeddings that a decoder attends to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.linformer_pytorch.keys import frequency_key, language_model_keys, stack_keys
from longspan.compat.linformer_pytorch.layers import (
    FeedForward,
    LinearAttentionHead,
    MHAttention,
    PositionalEmbedding,
    gen_causal_mask,
    get_EF,
)
from longspan.compat.linformer_pytorch.options import (
    POSITION_BASE,
    EncoderDecoderOptions,
    LanguageModelOptions,
    LinformerOptions,
    options_with_prefix,
)
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModule, KeyMapping
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


class _Model(CompatModule):
    options: Any
    last_call: tuple[Tensor, dict[str, Any]] | None = None

    def _build(self) -> None:
        raise NotImplementedError

    def _apply_model(self, tensor: Tensor, **arguments: Any) -> Tensor:
        raise NotImplementedError

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Apply the model.

        Args:
            tensor: Vectors (B, n, channels), or tokens (B, n) of a language model.
            input_mask: (B, n), True for tokens to attend to.
            embeddings: (B, m, channels), with decoder_mode.
            embeddings_mask: (B, m), True for embeddings to attend to.
            visualize: Save the arguments for `Visualizer`.
        """
        arguments = {"input_mask": input_mask, "embeddings": embeddings, "embeddings_mask": embeddings_mask}
        if not self.options.decoder_mode and (embeddings is not None or embeddings_mask is not None):
            raise ValueError("embeddings are for a decoder: build it with decoder_mode=True")
        if self.options.decoder_mode and embeddings is None:
            raise ValueError("a decoder attends to embeddings: pass embeddings=, of shape (B, m, channels)")
        if visualize:
            self.last_call = tensor.detach(), arguments
        return self._apply_model(tensor, key_mask=input_mask, context=embeddings, context_mask=embeddings_mask)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        options = self.options.adapt(shapes)
        if options != self.options:
            self.options = options
            _rebuild(self)


class Linformer(_Model):
    """Transformer of Linformer attention for vectors, (B, n, channels) -> (B, n, channels).

    Args:
        use_pos_emb: Add sinusoidal positions to the input.
    """

    model: Transformer

    @init_from(LinformerOptions, _LINFORMER_POSITIONAL)
    def __init__(self, options: LinformerOptions) -> None:
        super().__init__()
        self.options = options
        self.input_size, self.channels, self.depth = options.input_size, options.channels, options.depth
        self.nhead, self.decoder_mode = options.nhead, options.decoder_mode
        self.checkpoint_level = options.checkpoint_level
        self.pos_emb = SinusoidalPositions(self.channels, POSITION_BASE) if options.use_pos_emb else None
        self.not_in_model = "use_pos_emb adds positions before the model" if options.use_pos_emb else ""
        self._build()

    def _apply_model(self, tensor: Tensor, **arguments: Any) -> Tensor:
        if self.pos_emb is not None:
            tensor = tensor + self.pos_emb(torch.arange(tensor.shape[1], device=tensor.device)[None]).to(tensor.dtype)
        return self.model(tensor, **arguments)

    def key_mappings(self) -> Iterable[KeyMapping]:
        if self.pos_emb is not None:
            yield frequency_key("pos_emb.inv_freq", self.channels)
        yield from stack_keys(self.model, self.unused)

    def _build(self) -> None:
        self.model = Transformer(self.options.config())
        self.unused = self.options.finalize(self.model)


class LinformerLM(_Model):
    """Language model of Linformer attention: tokens (B, n) -> logits (B, n, num_tokens).

    With return_emb it returns hidden states (B, n, emb_dim).
    """

    model: LanguageModel

    @init_from(LanguageModelOptions, _LM_POSITIONAL)
    def __init__(self, options: LanguageModelOptions) -> None:
        super().__init__()
        self.options, self.input_size = options, options.input_size
        self.decoder_mode, self.return_emb = options.decoder_mode, options.return_emb
        self._build()

    def _apply_model(self, tensor: Tensor, **arguments: Any) -> Tensor:
        hidden = self.model.hidden(tensor, **arguments)
        if not self.return_emb:
            return self.model.logits(hidden)
        return hidden if self.model.from_dim is None else self.model.from_dim(hidden)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return language_model_keys(self.model, self.unused)

    def _build(self) -> None:
        self.model = LanguageModel(self.options.config())
        self.unused = self.options.finalize(self.model.transformer)


class LinformerEncDec(CompatModule):
    """Encoder-decoder model: source (B, m) and target (B, n) tokens -> logits (B, n, dec_num_tokens)."""

    model: EncoderDecoder

    @init_from(EncoderDecoderOptions, _ENC_DEC_POSITIONAL)
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.encoder_options = options_with_prefix(options, "enc_")
        self.decoder_options = options_with_prefix(options, "dec_")
        self._build()

    def forward(self, x: Tensor, y: Tensor | None = None, *, input_mask: Tensor | None = None) -> Tensor:
        """Return the logits of y (B, n), by default x, given x (B, m). input_mask: (B, m)."""
        y = x if y is None else y
        mask = torch.ones_like(x, dtype=torch.bool) if input_mask is None else input_mask
        context, _ = self.model.encode(x, mask)
        return self.model.decoder(y, context=context, context_mask=input_mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        assert isinstance(self.unused, nn.ModuleDict)
        for name, model in (("encoder", self.model.encoder), ("decoder", self.model.decoder)):
            unused = dict(self.unused.items()).get(name)
            yield from language_model_keys(model, unused, f"{name}.", f"unused.{name}.")

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        encoder = self.encoder_options.adapt(shapes, "encoder.")
        decoder = self.decoder_options.adapt(shapes, "decoder.")
        if (encoder, decoder) != (self.encoder_options, self.decoder_options):
            self.encoder_options, self.decoder_options = encoder, decoder
            _rebuild(self)

    def _build(self) -> None:
        # No token is padding; a mask hides tokens.
        configs = self.encoder_options.config(), self.decoder_options.config()
        self.model = EncoderDecoder(*configs, pad_token=-1)
        unused = {
            "encoder": self.encoder_options.finalize(self.model.encoder.transformer),
            "decoder": self.decoder_options.finalize(self.model.decoder.transformer),
        }
        self.unused = nn.ModuleDict({name: modules for name, modules in unused.items() if modules is not None})


def _rebuild(net: LinformerEncDec | _Model) -> None:
    """Replace the model by one of the current options, with the same device, dtype and mode."""
    parameter = next(net.model.parameters())
    net._build()
    net.to(parameter.device, parameter.dtype).train(net.training)
