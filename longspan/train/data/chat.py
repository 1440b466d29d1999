"""Conversations as text: the chat template of a tokenizer, and which part of the text is the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from longspan.utils import read_json

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]  # of characters, first and past the last
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
# ChatML, for tokenizers without a template of their own.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplate:
    """The chat template of a tokenizer: `chat_template.jinja` or `tokenizer_config.json` beside its file, or ChatML.

    Args:
        tokenizer: A tokenizer.json. None: tokens are bytes.

    Raises:
        ValueError: jinja2 is missing, or the template is damaged.
    """

    def __init__(self, tokenizer: Path | None) -> None:
        config: dict[str, Any] = {}
        own: Any = None
        if tokenizer is not None:
            beside = tokenizer.parent / "tokenizer_config.json"
            config = read_json(beside) if beside.is_file() else {}
            file = tokenizer.parent / "chat_template.jinja"
            own = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(own, list):  # several, by name
            own = next((x["template"] for x in own if x.get("name") == "default"), None)
        self.name = "ChatML" if own is None else "the tokenizer's template"
        self._template = _compile(CHATML if own is None else own)
        special = {name: config.get(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._special = {name: x.get("content", "") if isinstance(x, dict) else x for name, x in special.items()}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with `add_generation_prompt`, up to where an answer starts."""
        try:
            return str(
                self._template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._special
                )
            )
        except Exception as error:  # Templates raise errors of their own.
            raise ValueError(f"{self.name} refuses a conversation: {error}") from None

    def documents(self, messages: Sequence[Message]) -> list[tuple[str, Spans]]:
        """Return the text of a conversation and which characters are answers.

        A template may drop a part of earlier answers, such as their reasoning. The conversation then becomes one
        document for each answer.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found: list[tuple[str, Spans]] = []
        for turn in turns:
            before = self.render(messages[:turn], add_generation_prompt=True)
            text = self.render(messages[: turn + 1])
            if not text.startswith(before):
                raise ValueError(
                    f"{self.name} changes the text before an answer once the answer follows: answers cannot be found"
                )
            span = (len(before), len(text))
            if found and before.startswith(found[-1][0]):
                found[-1] = text, [*found[-1][1], span]
            else:
                found.append((text, [span]))
        return found


def read_messages(value: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`, also where they are named `from` and `value`.

    Raises:
        ValueError: A message has neither.
    """
    found = []
    for message in value:
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list):  # parts, of which some are text
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(role, str) or not isinstance(content, str | None):
            shown = json.dumps(message, default=str)[:60]
            raise ValueError(f"a message needs role and content (or from and value), got {shown}")
        rest = {name: x for name, x in message.items() if name not in ("role", "from", "content", "value")}
        found.append({**rest, "role": ROLES.get(role, role), "content": content or ""})
    return found


def _compile(source: str) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat data requires jinja2: pip install 'longspan[train]'") from None

    class GenerationTag(Extension):
        """`{% generation %}`, which marks answers for transformers."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template is damaged: {error}") from None
