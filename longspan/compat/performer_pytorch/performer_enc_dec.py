"""PerformerEncDec: a PerformerLM that reads, and one that writes with attention to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from longspan.compat.performer_pytorch.keys import idle_tensors, initialize
from longspan.compat.performer_pytorch.options import Options, features_of
from longspan.compat.performer_pytorch.performer_pytorch import (
    PerformerLM,
    language_model_entries,
    place_positions,
    settled,
    upgrade_key,
)
from longspan.compat.state_dict import CompatModule, KeyMapping, rename_layer
from longspan.models.transformer import EncoderDecoder

_SIDES = ("enc_", "dec_")


class PerformerEncDec(CompatModule):
    """Arguments that begin with enc_ or dec_ are those of PerformerLM. tie_token_embed: another tie_token_embeds."""

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
        encoder, decoder = _sides("PerformerEncDec", kwargs)
        for side, given in zip(_SIDES, (encoder, decoder), strict=True):
            _check(side, given)
        own = {"dim": dim, "no_projection": no_projection}
        self.options = (
            Options(**{"rotary_position_emb": True, **encoder, **own}),
            Options(**{"rotary_position_emb": True, **decoder, **own, "causal": True, "cross_attend": True}),
        )
        tie = tie_token_embeds or tie_token_embed
        configs = [options.config() for options in self.options]
        self.model = EncoderDecoder(*configs, pad_token=pad_value, tie_embeddings=tie)
        initialize(self.model)
        self.unused = nn.Module()
        for name, options, part in zip(
            ("enc", "dec"), self.options, (self.model.encoder, self.model.decoder), strict=True
        ):
            self.unused.add_module(name, idle_tensors(part, features_of(options.head_dim, options.nb_features)))
        # The encoder's logits, which nobody asks for, are in every checkpoint.
        vocabulary = self.options[0].num_tokens
        assert vocabulary is not None
        if not self.options[0].tie_embed:
            self.unused.add_module("to_out", nn.Linear(dim, vocabulary))

    @property
    def enc(self) -> PerformerLM:
        """The encoder. It has no logits: ask for return_encodings=True."""
        return PerformerLM.around(self.model.encoder, self.options[0])

    @property
    def dec(self) -> AutoregressiveWrapper:
        net = PerformerLM.around(self.model.decoder, self.options[1])
        return AutoregressiveWrapper(net, ignore_index=self.ignore_index, pad_value=self.pad_value)

    @torch.no_grad()
    def generate(self, seq_in: Tensor, seq_out_start: Tensor, seq_len: int, **kwargs: Any) -> Tensor:
        """Up to seq_len tokens after seq_out_start, about seq_in. enc_mask: of seq_in; others as in `dec.generate`."""
        prefixed = {name: value for name, value in kwargs.items() if name.startswith(_SIDES)}
        encoder, decoder = _sides("generate", prefixed)
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
        """The mean loss of seq_out given seq_in, or with return_loss=False logits. Masks are True for real tokens."""
        encodings = self.enc(seq_in, mask=enc_mask, return_encodings=True)
        about = {"context": encodings, "context_mask": enc_mask}
        return self.dec(seq_out, return_loss=return_loss, mask=dec_mask, **about)

    def key_mappings(self) -> Iterator[KeyMapping]:
        parts = self.model.encoder, self.model.decoder
        yield from language_model_entries(parts[0], self.options[0], "enc.", "encoder.", "enc.")
        if not self.options[0].tie_embed:
            yield from rename_layer("enc.to_out", "unused.to_out")
        yield from language_model_entries(parts[1], self.options[1], "dec.net.", "decoder.", "dec.")

    def upgrade_key(self, key: str) -> str:
        return upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        found = [settled(options, shapes, old) for options, old in zip(self.options, ("enc.", "dec.net."), strict=True)]
        for now, before, part in zip(found, self.options, (self.model.encoder, self.model.decoder), strict=True):
            if now is not before:
                place_positions(part, now)
        self.options = found[0], found[1]


def _sides(what: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is for the encoder and what for the decoder, without the prefixes."""
    unknown = [name for name in given if not name.startswith(_SIDES)]
    if unknown:
        raise TypeError(
            f"{what} has no argument {', '.join(unknown)}; the encoder's begin with enc_, the decoder's with dec_"
        )
    return tuple(  # type: ignore[return-value]
        {name.removeprefix(side): value for name, value in given.items() if name.startswith(side)} for side in _SIDES
    )


def _check(side: str, given: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(Options)}
    unknown = [side + name for name in given if name not in known]
    if unknown:
        raise TypeError(
            f"PerformerEncDec has no argument {', '.join(unknown)}; PerformerLM has {', '.join(sorted(known))}"
        )
    shared = [name for name in ("dim", "no_projection") if name in given]
    if shared:
        raise TypeError(f"{side}{shared[0]} cannot be given: {shared[0]} is one for both, without a prefix")
    decoder = side == "dec_"
    for name in ("causal", "cross_attend"):
        if given.get(name, decoder) != decoder:
            raise ValueError(
                f"{side}{name} must be {decoder}: the {'decoder writes' if decoder else 'encoder reads both ways'}"
            )
    missing = [side + name for name in ("num_tokens", "max_seq_len", "depth", "heads") if name not in given]
    if missing:
        raise TypeError(f"PerformerEncDec needs {', '.join(missing)}")
