"""Bodies of requests and errors in OpenAI's format.

Fields have OpenAI's names and defaults; `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids` and `ignore_eos` have
vLLM's. None stands for the default.
"""

from __future__ import annotations

import json
import math
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, field_validator, model_validator

from longspan.utils import nearest

B = TypeVar("B", bound=BaseModel)


class _FirstError(FailFast):
    """Ends the check of a list at its first error: a long list of wrong things must not take long to refuse."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)  # A member of a union must have one.


Texts = Annotated[list[str], _FirstError()]
Tokens = Annotated[list[int], _FirstError()]

IGNORED = (
    "user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"
)  # fmt: skip
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # the values that change nothing, and why there are no others
    "best_of": ((), "choices are not ranked: ask for n choices and choose among them"),
    "suffix": (("",), "models continue a text and cannot fill in before a suffix: put all of it in the prompt"),
    "logit_bias": (({},), "logits cannot be changed by token: use temperature, top_k, top_p or min_p"),
    "frequency_penalty": ((0, 0.0), "there is one penalty: use repetition_penalty, 1 for none"),
    "presence_penalty": ((0, 0.0), "there is one penalty: use repetition_penalty, 1 for none"),
    "tools": (([],), "tools are not supported: describe them in a message, and parse the answer"),
    "tool_choice": (("none", "auto"), "tools are not supported"),
    "parallel_tool_calls": ((True, False), "tools are not supported"),
    "functions": (([],), "functions are not supported: describe them in a message, and parse the answer"),
    "function_call": (("none", "auto"), "functions are not supported"),
    "response_format": (({"type": "text"},), "the format of an answer cannot be enforced: ask for it in a message"),
    "modalities": ((["text"],), "models read and write text only"),
    "audio": ((), "models read and write text only"),
    "prediction": ((), "use longspan serve --speculation"),
    "reasoning_effort": (("none",), "models have no reasoning mode"),
    "verbosity": (("medium",), "models have no such setting: ask for it in a message"),
    "web_search_options": ((), "there is no web search"),
}


class APIError(Exception):
    """An error to answer a request with.

    Args:
        status: HTTP status.
        message: What was got, what is allowed, what to do.
        kind: OpenAI's type of the error.
        param: The option that is wrong.
        code: A short name of the error.
        headers: More headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.headers = status, kind, param, code, headers or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(APIError, kind=self.kind, param=self.param, code=self.code, headers=self.headers), (
            self.status,
            str(self),
        )

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI writes it."""
        message = str(self).encode(errors="replace").decode()  # A name in it may hold half a surrogate pair.
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool | None = None


class _GenerationBody(_Body):
    """What both kinds of completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    previous_state: str | None = None
    keep_state: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        """Drop what is ignored or changes nothing, and refuse what is not supported."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in IGNORED:
                continue
            if name in _REFUSED:
                neutral, reason = _REFUSED[name]
                if value is not None and value not in neutral:
                    raise APIError(400, f"{name} is not supported: {reason}", param=name, code="unsupported_option")
                continue
            kept[name] = value
        return kept

    @model_validator(mode="after")
    def _check(self) -> _GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options are for streams: set stream to true too", param="stream_options")
        return self


class CompletionBody(_GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], _FirstError()]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], _FirstError()]
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                text = f"messages.content of type {_shorten(kind)!r} is not supported: models read text only"
                raise APIError(400, text, param="messages", code="unsupported_option")
        return content

    @property
    def text(self) -> str:
        """The text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(_GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], _FirstError()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class StateBody(_Body):
    """The body of `POST /v1/states` and `POST /v1/states/{name}/fork`: a copy of a state, under a name if given."""

    source: str | None = None
    name: str | None = None


def parse_body(cls: type[B], content: bytes) -> B:
    """Return a body of the given class.

    Raises:
        APIError: If it is not valid.
    """
    try:
        data = json.loads(content.decode(), parse_constant=_refuse_constant, parse_float=_parse_float)
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else _shorten(str(error))
        raise APIError(400, f"the body is not JSON: {why}") from None
    if not isinstance(data, dict):
        raise APIError(400, f"the body must be a JSON object, got {_kind(data)}")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _worded(cls, error) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{_shorten(text)} is too large for a number")
    return number


def _worded(cls: type[BaseModel], error: ValidationError) -> APIError:
    """Return the first error of a validation, in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    name = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        known = (*cls.model_fields, *IGNORED)
        given = _shorten(str(first["loc"][-1]))
        text = f"unknown option {given!r}{nearest(given, known) if len(first['loc']) == 1 else ''}"
        return APIError(400, text, param=given, code="unknown_option")
    if first["type"] == "missing":
        return APIError(400, f"{name} is missing", param=name)
    if path and path[0] in ("prompt", "stop", "stop_token_ids"):
        path = path[:1]  # The rest names an alternative of a union.
    field = cls.model_fields.get(path[0]) if len(path) == 1 else None
    got = _kind(first["input"])
    if field is None:
        return APIError(400, f"{name}: {first['msg'].lower()}, got {got}", param=name)
    return APIError(400, f"{path[0]} must be {_expected(field.annotation)}, got {got}", param=path[0])


def _expected(annotation: Any, *, several: bool = False) -> str:
    """Return the type of a field in words, as JSON has it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _expected(arguments[0], several=several)
    if origin is list:
        return f"{'lists' if several else 'a list'} of {_expected(arguments[0], several=True)}"
    if origin in (Union, UnionType):
        return ", or ".join(_expected(one, several=several) for one in arguments if one is not type(None))
    names = {str: ("text", "texts"), int: ("an integer", "integers"), float: ("a number", "numbers")}
    names[bool] = ("true or false", "true or false")
    return names.get(annotation, ("an object", "objects"))[several]


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return _shorten(json.dumps(value))
    return "a list" if isinstance(value, list) else "an object"


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"
