"""A byte tokenizer for transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from longspan.generation.tokenization import TOKENIZER
from longspan.hf.config import checkpoint_of

_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class ByteTokenizer(PreTrainedTokenizer):
    """Token i is byte i, and byte 0 pads.

    Text is UTF-8. Invalid bytes decode to lone surrogates (Python's surrogateescape), which encode to the same bytes:
    any bytes survive a round trip.

    Args:
        **options: Those of `PreTrainedTokenizer`.
    """

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, **options: Any) -> None:
        options.setdefault("pad_token", chr(0))
        options.setdefault("clean_up_tokenization_spaces", False)
        options.setdefault("split_special_tokens", True)
        super().__init__(**options)

    @classmethod
    def from_pretrained(cls, name: Any, *arguments: Any, **options: Any) -> Any:
        """Load the tokenizer of a checkpoint or run: the one in its `tokenizer.json`, or this one if there is none."""
        name = checkpoint_of(name)
        found = {key: options[key] for key in _HUB if key in options}
        if cached_file(name, TOKENIZER, _raise_exceptions_for_missing_entries=False, **found) is not None:
            return PreTrainedTokenizerFast.from_pretrained(name, *arguments, **options)
        return super().from_pretrained(name, *arguments, **options)

    @property
    def vocab_size(self) -> int:
        """256."""
        return 256

    def get_vocab(self) -> dict[str, int]:
        """Return the token of each character."""
        return {chr(i): i for i in range(256)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8", "surrogateescape")]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of tokens."""
        return bytes(ord(token) for token in tokens).decode("utf-8", "surrogateescape")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write nothing: there is no vocabulary file."""
        return ()
