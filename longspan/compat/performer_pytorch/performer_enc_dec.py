"""PerformerEncDec: an encoder and a decoder, both a PerformerLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.options import init_from, without_prefix
from longspan.compat.performer_pytorch import keys
from longspan.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from longspan.compat.performer_pytorch.options import EncoderDecoderOptions, PerformerLMOptions
from longspan.compat.performer_pytorch.performer_pytorch import (
    PerformerLM,
    ignored_axial_positions,
    without_axial_positions,
)
from longspan.compat.state_dict import CompatModule, KeyMapping, rename_layer
from longspan.models.transformer import EncoderDecoder, LanguageModel


class PerformerEncDec(CompatModule):
    """Encoder-decoder model. Arguments that start with enc_ or dec_ are arguments of PerformerLM.

    tie_token_embed: An alias of tie_token_embeds.
    """

    model: EncoderDecoder

    @init_from(EncoderDecoderOptions, "dim ignore_index pad_value tie_token_embeds no_projection")
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.ignore_index, self.pad_value = options.ignore_index, options.pad_value
        shared = {"dim": options.dim, "no_projection": options.no_projection}
        self.options = (
            PerformerLMOptions(**without_prefix(options, "enc_"), **shared),
            PerformerLMOptions(**without_prefix(options, "dec_"), **shared),
        )
        tie = options.tie_token_embeds or options.tie_token_embed
        encoder, decoder = (part.config() for part in self.options)
        self.model = EncoderDecoder(encoder, decoder, pad_token=options.pad_value, tie_embeddings=tie)
        keys.initialize(self.model)
        self.unused = nn.Module()
        for name, own, part in zip(("enc", "dec"), self.options, self._parts, strict=True):
            self.unused.add_module(name, keys.unused_tensors(part, own.num_features(own.head_dim)))
        # The original saves an output layer of the encoder that it never uses.
        if not self.options[0].tied:
            self.unused.add_module("to_out", nn.Linear(options.dim, self.options[0].num_tokens))

    @property
    def enc(self) -> PerformerLM:
        """The encoder, which has no output layer: call it with return_encodings=True."""
        return PerformerLM.around(self.model.encoder, self.options[0])

    @property
    def dec(self) -> AutoregressiveWrapper:
        """The decoder."""
        net = PerformerLM.around(self.model.decoder, self.options[1])
        return AutoregressiveWrapper(net, ignore_index=self.ignore_index, pad_value=self.pad_value)

    @torch.no_grad()
    def generate(self, seq_in: Tensor, seq_out_start: Tensor, seq_len: int, **kwargs: Any) -> Tensor:
        """Return up to seq_len tokens after seq_out_start, given seq_in.

        Args:
            seq_in: Source tokens (B, S).
            seq_out_start: The first target tokens (B, T).
            seq_len: The largest number of new tokens.
            **kwargs: enc_mask, the mask of seq_in, and arguments of `dec.generate`.
        """
        encoder = {name.removeprefix("enc_"): value for name, value in kwargs.items() if name.startswith("enc_")}
        decoder = {name.removeprefix("dec_"): value for name, value in kwargs.items() if not name.startswith("enc_")}
        decoder.setdefault("context_mask", encoder.get("mask"))
        was_training = self.training
        self.eval()
        try:
            encodings = self.enc(seq_in, return_encodings=True, **encoder)
            return self.dec.generate(seq_out_start, seq_len, context=encodings, **decoder)
        finally:
            self.train(was_training)

    def forward(
        self,
        seq_in: Tensor,
        seq_out: Tensor,
        enc_mask: Tensor | None = None,
        return_loss: bool = True,
        dec_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of seq_out given seq_in, or logits with return_loss=False. Masks: True for tokens."""
        encodings = self.enc(seq_in, mask=enc_mask, return_encodings=True)
        return self.dec(seq_out, return_loss=return_loss, mask=dec_mask, context=encodings, context_mask=enc_mask)

    def key_mappings(self) -> Iterator[KeyMapping]:
        encoder, decoder = self._parts
        yield from keys.language_model_keys(encoder, self.options[0], "enc.", "encoder.", "enc.")
        if not self.options[0].tied:
            yield from rename_layer("enc.to_out", "unused.to_out")
        yield from keys.language_model_keys(decoder, self.options[1], "dec.net.", "decoder.", "dec.")

    def upgrade_key(self, key: str) -> str:
        return keys.upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        encoder, decoder = (
            without_axial_positions(part, options) if ignored_axial_positions(options, shapes, old) else options
            for part, options, old in zip(self._parts, self.options, ("enc.", "dec.net."), strict=True)
        )
        self.options = encoder, decoder

    @property
    def _parts(self) -> tuple[LanguageModel, LanguageModel]:
        return self.model.encoder, self.model.decoder
