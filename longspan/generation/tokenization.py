"""Tokens as text: bytes, or what a tokenizer makes of it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"  # beside a model's weights, where it was trained with one


def load_tokenizer(path: Path) -> Any:
    """A Hugging Face tokenizer file."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"{path} needs the package tokenizers: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises plain Exception.
        raise ValueError(f"{path} is not a Hugging Face tokenizer file (tokenizer.json): {error}") from None


class TextCodec:
    """encode and decode for a model; tokens above 255 without a tokenizer are shown as numbers."""

    def __init__(self, tokenizer: Path | None) -> None:
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)

    @classmethod
    def beside(cls, model: Path) -> TextCodec:
        """Of a checkpoint folder: with the tokenizer in it, if there is one."""
        tokenizer = model / TOKENIZER
        return cls(tokenizer if tokenizer.exists() else None)

    def fits(self, vocab_size: int | None) -> bool:
        """Whether a model with this many tokens can read any text and say only what can be shown."""
        if vocab_size is None or self._tokenizer is None:
            return vocab_size == 256
        return vocab_size >= int(self._tokenizer.get_vocab_size())

    def encode(self, text: bytes) -> list[int]:
        """text is UTF-8 where there is a tokenizer, and anything at all where there is none."""
        if self._tokenizer is None:
            return list(text)
        return list(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        if max(tokens, default=0) > 255:
            return " ".join(map(str, tokens))
        return bytes(tokens).decode("utf-8", "replace")

    def reader(self) -> StreamDecoder:
        return StreamDecoder(self._tokenizer)


class StreamDecoder:
    """Text as its tokens come, in whole characters. said: all of it so far."""

    def __init__(self, tokenizer: Any) -> None:
        self.said = ""
        self._tokens: list[int] = []
        self._tokenizer, self._decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")
        if tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=False)

    def read(self, token: int) -> str:
        """What the token adds: nothing while its character is not whole."""
        if self._tokenizer is None:
            piece = self._decoder.decode(bytes([token]))
        else:
            self._tokens.append(token)
            piece = self._stream.step(self._tokenizer, token) or ""
        self.said += piece
        return piece

    def rest(self) -> str:
        """What is left at the end: marks for a character that never became whole."""
        if self._tokenizer is None:
            piece = self._decoder.decode(b"", final=True)
        else:
            piece = self._tokenizer.decode(self._tokens, skip_special_tokens=False)[len(self.said) :]
        self.said += piece
        return piece
