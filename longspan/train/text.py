"""Tokens as text: bytes, or what a tokenizer makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_tokenizer(path: Path) -> Any:
    """A Hugging Face tokenizer file."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises plain Exception.
        raise ValueError(f"{path} is not a Hugging Face tokenizer file (tokenizer.json): {error}") from None


class Text:
    """encode and decode for a model; tokens above 255 without a tokenizer are shown as numbers."""

    def __init__(self, tokenizer: Path | None) -> None:
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        if max(tokens, default=0) > 255:
            return " ".join(map(str, tokens))
        return bytes(tokens).decode("utf-8", "replace")
