"""How the messages of a conversation become one text: the tokenizer's chat template, or a plain one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from longspan.generation.tokenization import TOKENIZER_SETTINGS, TextCodec
from longspan.utils import read_json

PLAIN = (
    "{%- for message in messages -%}"
    "{{ message.role.capitalize() + ': ' + message.content + '\n\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"
)
PLAIN_STOP = "\n\nUser:"
_MARK = "\ue000"  # stands for an earlier answer; no template has this character
_SETTINGS, _JINJA = TOKENIZER_SETTINGS
_GENERATION = "generation_config.json"


class ChatTemplate:
    """A chat template in Jinja, run in a sandbox.

    Args:
        source: The template; None for the plain one: "User: …" and "Assistant: …" with empty lines between them.
        variables: What the template may use beside the messages, as `bos_token`.

    Attributes:
        stop: Text that ends an answer.
        is_plain: Whether it is the plain one.

    Raises:
        ValueError: If it is not a template.
    """

    def __init__(self, source: str | None = None, variables: Mapping[str, Any] | None = None) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.is_plain = source is None
        self.stop = (PLAIN_STOP,) if source is None else ()
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(PLAIN if source is None else source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be used: {error}") from None

    @classmethod
    def from_folder(cls, folder: Path, file: Path | None = None) -> ChatTemplate:
        """Return the template of a checkpoint folder, or the plain one if it has none.

        Args:
            folder: A folder with `chat_template.jinja`, or with `tokenizer_config.json` that has a `chat_template`.
            file: A file with another template.
        """
        settings = _read(folder / _SETTINGS)
        tokens = {name: _token(settings[name]) for name in settings if name.endswith("_token")}
        source = settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((item["template"] for item in source if item.get("name") == "default"), None)
        for path in (folder / _JINJA, file):
            if path is not None and (path == file or path.exists()):
                source = path.read_text(encoding="utf-8")
        return cls(source, tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a conversation, up to where the answer begins.

        Raises:
            ValueError: If the template refuses the messages.
        """
        return self._render(messages, add_generation_prompt=True)

    def render_after(self, messages: Sequence[Mapping[str, str]], before: str, ends: Sequence[str]) -> str:
        """Return the text that continues a conversation whose last message was an answer.

        Args:
            messages: The new messages.
            before: The end of what has been read, which may hold the end of the answer.
            ends: Texts that end an answer.
        """
        earlier = [{"role": "user", "content": "…"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*earlier, *messages], add_generation_prompt=True)
        if text.count(_MARK) != 1:
            raise ValueError(
                "this chat template cannot continue a state: leave previous_state out, and send all messages"
            )
        text = text.partition(_MARK)[2]
        for end in ends:
            if before.endswith(end) and text.startswith(end):
                return text[len(end) :]
        return text

    def _render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=[dict(x) for x in messages], **self._variables, **options)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None


def end_tokens(folder: Path, codec: TextCodec) -> dict[int, str]:
    """Return the tokens that end a text, with their names, as the files of a checkpoint folder give them."""
    settings, generation = _read(folder / _SETTINGS), _read(folder / _GENERATION)
    found: dict[int, str] = {}
    name = _token(settings.get("eos_token"))
    token = codec.find_token(name) if name else None
    if token is not None:
        found[token] = name
    listed = generation.get("eos_token_id")
    for number in listed if isinstance(listed, list) else [listed]:
        if isinstance(number, int) and not codec.is_bytes:
            found.setdefault(number, codec.decode([number]))
    return found


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _token(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
