"""Text and tokens: bytes, or a Hugging Face tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"  # in a checkpoint folder, if the model was trained with a tokenizer
TOKENIZER_SETTINGS = ("tokenizer_config.json", "chat_template.jinja")  # beside it, if the tokenizer has them


def load_tokenizer(path: Path) -> Any:
    """Load a Hugging Face tokenizer file.

    Args:
        path: A tokenizer.json.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        ValueError: If the file is not one, or the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"{path} needs the package tokenizers: pip install tokenizers") from None
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a Hugging Face tokenizer file (tokenizer.json): it is not a file")
    try:
        return Tokenizer.from_file(str(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # The package raises plain Exception; a panic of its Rust code is none.
        raise ValueError(f"{path} is not a Hugging Face tokenizer file (tokenizer.json): {error}") from None


class TextCodec:
    """Encodes and decodes a model's text.

    Args:
        tokenizer: A tokenizer.json, or None for bytes.
    """

    def __init__(self, tokenizer: Path | None) -> None:
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)

    @classmethod
    def from_checkpoint(cls, folder: Path) -> TextCodec:
        """Return the codec of a checkpoint folder: its tokenizer if there is one, otherwise bytes."""
        tokenizer = folder / TOKENIZER
        return cls(tokenizer if tokenizer.exists() else None)

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return self._tokenizer is None

    def find_token(self, text: str) -> int | None:
        """Return the token that a name such as "</s>" stands for; None if there is none."""
        return None if self._tokenizer is None else self._tokenizer.token_to_id(text)

    def fits(self, vocab_size: int | None) -> bool:
        """Return whether a model with this vocabulary can read any text, and text can show all it generates."""
        if vocab_size is None or self._tokenizer is None:
            return vocab_size == 256
        return vocab_size >= int(self._tokenizer.get_vocab_size())

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ValueError: If there is a tokenizer and the text is not UTF-8.
        """
        if self._tokenizer is None:
            return list(text)
        try:
            return list(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids)
        except UnicodeDecodeError as error:
            raise ValueError(f"the text is not UTF-8, which the tokenizer requires: {error}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Without a tokenizer, tokens above 255 are shown as numbers."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        if max(tokens, default=0) > 255:
            return " ".join(map(str, tokens))
        return bytes(tokens).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder for tokens that arrive one at a time."""
        return StreamDecoder(self._tokenizer)


class StreamDecoder:
    """Decodes tokens one at a time into complete characters.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or None for bytes.

    Attributes:
        text: The text so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._tokens: list[int] = []
        self._tokenizer, self._decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")
        if tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        """Return the text that a token adds, empty while a character is incomplete."""
        return self.extend([token])

    def extend(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens add, without the last character while it is incomplete."""
        if self._tokenizer is None:
            piece = self._decoder.decode(bytes(tokens))
        else:
            self._tokens += tokens
            piece = "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        self.text += piece
        return piece

    def flush(self) -> str:
        """Return the text left at the end: replacement characters for an incomplete one."""
        if self._tokenizer is None:
            piece = self._decoder.decode(b"", final=True)
        else:
            piece = self._tokenizer.decode(self._tokens, skip_special_tokens=False)[len(self.text) :]
        self.text += piece
        return piece
