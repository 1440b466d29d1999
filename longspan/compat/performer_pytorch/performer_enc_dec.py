"""PerformerEncDec: an encoder and a decoder, both a PerformerLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.faithful import faithful, resolve_faithful
from longspan.compat.options import init_from, without_prefix
from longspan.compat.performer_pytorch import keys
from longspan.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from longspan.compat.performer_pytorch.kernels import RELU
from longspan.compat.performer_pytorch.options import EncoderDecoderOptions
from longspan.compat.performer_pytorch.performer_pytorch import PerformerLM
from longspan.compat.state_dict import CompatModel, KeyMapping
from longspan.models.transformer import EncoderDecoder

Arguments = dict[str, Any]
ENC_PREFIX, DEC_PREFIX = "enc_", "dec_"


def group_dict_by_key(cond: Callable[[str], bool], d: Mapping[str, Any]) -> tuple[Arguments, Arguments]:
    """Return the entries whose key satisfies a condition, and the others."""
    return {key: d[key] for key in d if cond(key)}, {key: d[key] for key in d if not cond(key)}


def string_begins_with(prefix: str, str: str) -> bool:
    """Return whether a string begins with a prefix."""
    return str.startswith(prefix)


def group_by_key_prefix(prefix: str, d: Mapping[str, Any]) -> tuple[Arguments, Arguments]:
    """Return the entries whose key begins with a prefix, and the others."""
    return group_dict_by_key(lambda key: key.startswith(prefix), d)


def group_by_key_prefix_and_remove_prefix(prefix: str, d: Mapping[str, Any]) -> tuple[Arguments, Arguments]:
    """Return the entries whose key begins with a prefix, without it, and the others."""
    found, others = group_by_key_prefix(prefix, d)
    return {key.removeprefix(prefix): value for key, value in found.items()}, others


def extract_enc_dec_kwargs(kwargs: Mapping[str, Any]) -> tuple[Arguments, Arguments, Arguments]:
    """Return the arguments of the encoder and of the decoder, without their prefixes, and the others."""
    encoder, others = group_by_key_prefix_and_remove_prefix(ENC_PREFIX, kwargs)
    return encoder, *group_by_key_prefix_and_remove_prefix(DEC_PREFIX, others)


def extract_and_set_enc_dec_kwargs(kwargs: Mapping[str, Any]) -> tuple[Arguments, Arguments, Arguments]:
    """Return `extract_enc_dec_kwargs`, with the encoder's mask as context_mask of the decoder."""
    encoder, decoder, others = extract_enc_dec_kwargs(kwargs)
    if "mask" in encoder:
        decoder.setdefault("context_mask", encoder["mask"])
    return encoder, decoder, others


class PerformerEncDec(CompatModel):
    """Encoder-decoder model. Arguments that start with enc_ or dec_ are arguments of PerformerLM.

    Args:
        tie_token_embed: An alias of tie_token_embeds.
        faithful: Whether to compute as the original does, defects included; see docs/migrating.md.
    """

    @init_from(EncoderDecoderOptions, "dim ignore_index pad_value tie_token_embeds no_projection")
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.faithful, self.pad_value = resolve_faithful(options.faithful), options.pad_value
        shared = {"dim": options.dim, "no_projection": options.no_projection}
        sides = [without_prefix(options, ENC_PREFIX), without_prefix(options, DEC_PREFIX)]
        kernel = nn.ReLU()
        for side in sides:  # Both have one default kernel, as in the original.
            side["kernel_fn"] = kernel if side["kernel_fn"] is RELU else side["kernel_fn"]
        with faithful(self.faithful):
            encoder, decoder = (PerformerLM(**side, **shared) for side in sides)
        self.tied = options.tie_token_embeds or options.tie_token_embed
        if self.tied:
            encoder.token_emb = decoder.token_emb
        self.enc = encoder
        self.dec = AutoregressiveWrapper(decoder, ignore_index=options.ignore_index, pad_value=options.pad_value)
        self.record_structure()

    @torch.no_grad()
    def generate(self, seq_in: Tensor, seq_out_start: Tensor, seq_len: int, **kwargs: Any) -> Tensor:
        """Return up to seq_len tokens after seq_out_start, given seq_in.

        Arguments that start with enc_ are arguments of the encoder, others of `AutoregressiveWrapper.generate`.
        """
        encoder, decoder, others = extract_and_set_enc_dec_kwargs(kwargs)
        training = self.enc.training
        self.enc.train(training and self.faithful)
        try:
            encodings = self.enc(seq_in, return_encodings=True, **encoder)
        finally:
            self.enc.train(training)
        return self.dec.generate(seq_out_start, seq_len, context=encodings, **decoder, **others)

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

    def longspan_model(self) -> EncoderDecoder:
        encoder, decoder = self._parts[0].longspan_model(), self._parts[1].longspan_model()
        return EncoderDecoder(encoder.config, decoder.config, pad_token=self.pad_value, tie_embeddings=self.tied)

    def key_mappings(self) -> Iterator[KeyMapping]:
        for part, old, new in zip(self._parts, ("enc.", "dec.net."), ("encoder.", "decoder."), strict=True):
            for mapping in keys.language_model_keys(part.options):
                # The encoder of the original has an output layer, which it never uses.
                if new == "decoder." or not mapping.old[0].startswith("to_out."):
                    yield mapping.with_prefix(old, new)

    def upgrade_key(self, key: str) -> str:
        return keys.upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        for part, old in zip(self._parts, ("enc", "dec.net"), strict=True):
            own, _ = group_by_key_prefix_and_remove_prefix(f"{old}.", shapes)
            part.adapt_to_checkpoint(own)
            self.record_structure(f"{old}.pos_emb")

    @property
    def _parts(self) -> tuple[PerformerLM, PerformerLM]:
        net = self.dec.net
        assert isinstance(net, PerformerLM)
        return self.enc, net
