"""Conversations as text: the chat template of a tokenizer, or ChatML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from longspan.generation.tokenization import TOKENIZER_SETTINGS, TextCodec
from longspan.utils import read_json

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]  # of characters, first and past the last
# ChatML, for tokenizers without a template of their own.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_END = "<|im_end|>"
_SETTINGS, _JINJA = TOKENIZER_SETTINGS
_GENERATION = "generation_config.json"
_MARK = "\ue000"  # stands for an earlier answer; no template has this character


class ChatTemplate:
    """The chat template of a tokenizer: `chat_template.jinja` or `tokenizer_config.json` beside its file, or ChatML.

    Args:
        tokenizer: A tokenizer.json. None: tokens are bytes.
        template: A file with another template.

    Attributes:
        name: What the template is, for messages.
        ends: Texts that end an answer, beside the tokens that do.

    Raises:
        ValueError: jinja2 is missing, or the template is damaged.
    """

    def __init__(self, tokenizer: Path | None = None, template: Path | None = None) -> None:
        config: dict[str, Any] = {}
        own: Any = None
        if tokenizer is not None:
            beside = tokenizer.parent / _SETTINGS
            config = read_json(beside) if beside.is_file() else {}
            file = tokenizer.parent / _JINJA
            own = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(own, list):  # several, by name
            own = next((x["template"] for x in own if x.get("name") == "default"), None)
        if template is not None:
            own = template.read_text(encoding="utf-8")
        self.name = "ChatML" if own is None else "the tokenizer's template" if template is None else str(template)
        self.ends = (CHATML_END,) if own is None else ()
        self._source: str = CHATML if own is None else own
        self._template = _compile(self._source)
        special = {name: config.get(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._special = {name: x.get("content", "") if isinstance(x, dict) else x for name, x in special.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the source of the template in place of its code."""
        return {**vars(self), "_template": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_template": _compile(state["_source"])}

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

    def render_after(self, messages: Sequence[Message], before: str, ends: Sequence[str] = ()) -> str:
        """Return the text that continues a conversation whose last message was an answer.

        Args:
            messages: The new messages.
            before: The end of what has been read, which may hold the end of the answer.
            ends: Texts that end an answer, beside the template's.

        Raises:
            ValueError: If the template changes earlier messages.
        """
        earlier: list[Message] = [{"role": "user", "content": "…"}, {"role": "assistant", "content": _MARK}]
        text = self.render([*earlier, *messages], add_generation_prompt=True)
        if text.count(_MARK) != 1:
            raise ValueError(f"{self.name} drops earlier answers: a state cannot be continued, send all messages")
        text = text.partition(_MARK)[2]
        for end in (*self.ends, *ends):
            if before.endswith(end) and text.lstrip().startswith(end):
                return text.lstrip()[len(end) :]
        return text

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


def end_tokens(folder: Path, codec: TextCodec) -> dict[int, str]:
    """Return the tokens that end a text, with their texts, as the files of a checkpoint folder name them."""
    settings, generation = (
        read_json(path) if path.is_file() else {} for path in (folder / _SETTINGS, folder / _GENERATION)
    )
    found: dict[int, str] = {}
    name = settings.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    token = codec.find_token(name) if isinstance(name, str) else None
    if token is not None:
        found[token] = str(name)
    listed = generation.get("eos_token_id")
    for number in listed if isinstance(listed, list) else [listed]:
        if isinstance(number, int) and not codec.is_bytes:
            found.setdefault(number, codec.decode([number]))
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
