"""PerformerEncDec: an encoder and a decoder, both a PerformerLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from longspan.compat.performer_pytorch.keys import initialize, language_model_keys, unused_tensors, upgrade_key
from longspan.compat.performer_pytorch.options import PerformerLMOptions
from longspan.compat.performer_pytorch.performer_pytorch import (
    PerformerLM,
    ignored_axial_positions,
    without_axial_positions,
)
from longspan.compat.state_dict import CompatModule, KeyMapping, rename_layer
from longspan.models.transformer import EncoderDecoder, LanguageModel

_PREFIXES = ("enc_", "dec_")


class PerformerEncDec(CompatModule):
    """Encoder-decoder model. Arguments that start with enc_ or dec_ are arguments of PerformerLM.

    tie_token_embed: An alias of tie_token_embeds.
    """

    model: EncoderDecoder

    def __init__(
        self,
        dim: int,
        ignore_index: int = 0,
        pad_value: int = 0,
        tie_token_embeds: bool = False,
        no_projection: bool = False,
        tie_token_embed: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.ignore_index, self.pad_value = ignore_index, pad_value
        encoder, decoder = _split_prefixes("PerformerEncDec", kwargs)
        for prefix, arguments in zip(_PREFIXES, (encoder, decoder), strict=True):
            _check_arguments(prefix, arguments)
        shared: dict[str, Any] = {"dim": dim, "no_projection": no_projection}
        self.options = (
            PerformerLMOptions(**encoder, **shared),
            PerformerLMOptions(**{**decoder, "causal": True, "cross_attend": True}, **shared),
        )
        configs = [options.config() for options in self.options]
        tie = tie_token_embeds or tie_token_embed
        self.model = EncoderDecoder(*configs, pad_token=pad_value, tie_embeddings=tie)
        initialize(self.model)
        self.unused = nn.Module()
        for name, options, part in zip(("enc", "dec"), self.options, self._parts, strict=True):
            self.unused.add_module(name, unused_tensors(part, options.num_features(options.head_dim)))
        # The original saves an output layer of the encoder that it never uses.
        if not self.options[0].tied:
            self.unused.add_module("to_out", nn.Linear(dim, self.options[0].num_tokens))

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
        prefixed = {name: value for name, value in kwargs.items() if name.startswith(_PREFIXES)}
        encoder, decoder = _split_prefixes("generate", prefixed)
        decoder |= {name: value for name, value in kwargs.items() if name not in prefixed}
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
        yield from language_model_keys(encoder, self.options[0], "enc.", "encoder.", "enc.")
        if not self.options[0].tied:
            yield from rename_layer("enc.to_out", "unused.to_out")
        yield from language_model_keys(decoder, self.options[1], "dec.net.", "decoder.", "dec.")

    def upgrade_key(self, key: str) -> str:
        return upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        encoder, decoder = (
            without_axial_positions(part, options) if ignored_axial_positions(options, shapes, old) else options
            for part, options, old in zip(self._parts, self.options, ("enc.", "dec.net."), strict=True)
        )
        self.options = encoder, decoder

    @property
    def _parts(self) -> tuple[LanguageModel, LanguageModel]:
        return self.model.encoder, self.model.decoder


def _split_prefixes(function: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the encoder and those of the decoder, without prefixes."""
    unknown = [name for name in arguments if not name.startswith(_PREFIXES)]
    if unknown:
        raise TypeError(
            f"{function} has no argument {', '.join(unknown)}; prefix arguments of the encoder with enc_ and those of "
            "the decoder with dec_"
        )
    encoder, decoder = (
        {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}
        for prefix in _PREFIXES
    )
    return encoder, decoder


def _check_arguments(prefix: str, arguments: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(PerformerLMOptions)}
    unknown = [prefix + name for name in arguments if name not in known]
    if unknown:
        raise TypeError(
            f"PerformerEncDec has no argument {', '.join(unknown)}; PerformerLM has {', '.join(sorted(known))}"
        )
    shared = [name for name in ("dim", "no_projection") if name in arguments]
    if shared:
        raise TypeError(f"{prefix}{shared[0]} is not an argument: encoder and decoder share {shared[0]}")
    decoder = prefix == "dec_"
    for name in ("causal", "cross_attend"):
        if arguments.get(name, decoder) != decoder:
            part = "decoder is causal and attends to the encoder" if decoder else "encoder is bidirectional"
            raise ValueError(f"{prefix}{name} must be {decoder}: the {part}")
    missing = [prefix + name for name in ("num_tokens", "max_seq_len", "depth", "heads") if name not in arguments]
    if missing:
        raise TypeError(f"PerformerEncDec needs {', '.join(missing)}")
