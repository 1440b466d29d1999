"""From the body of a request to the engine's requests, and from its streams to OpenAI's responses."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longspan.generation.chat_template import ChatTemplate
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session
from longspan.generation.tokenization import StreamDecoder, TextCodec
from longspan.serve.engine import Engine, EngineClosedError, EngineFailedError, QueueFullError
from longspan.serve.engine_service import RemoteEngine, RemoteStates
from longspan.serve.metrics import Metrics
from longspan.serve.openai_protocol import APIError, ChatBody, CompletionBody
from longspan.serve.request import MAX_LOGPROBS, Completion, Delta, Generation, Request, SavedState
from longspan.serve.state_store import StateStore

_MAX_CHOICES = 128
_MAX_STOP = 16
_COMPLETION_TOKENS = 16  # OpenAI's default
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Limits:
    """The largest values that a request may have.

    Attributes:
        prompt: Tokens of a prompt.
        tokens: Tokens to generate for each choice.
        timeout: Seconds.
    """

    prompt: int = 1 << 20
    tokens: int = 4096
    timeout: float | None = None


class ServedModel:
    """A model that answers requests in OpenAI's format.

    Args:
        engine: The engine, of this process or another; it needs a codec.
        name: Name of the model.
        states: Saved states.
        template: How messages become a text; ChatML unless given.
        ends: Tokens that end a text, with their names.
        limits: The largest values that a request may have.

    Raises:
        ValueError: If the engine has no codec.
    """

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        name: str,
        states: StateStore | RemoteStates,
        *,
        template: ChatTemplate | None = None,
        ends: dict[int, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        if engine.codec is None:
            raise ValueError("text needs a codec: give the engine one")
        self.engine, self.name, self.states, self.codec = engine, name, states, engine.codec
        self.template, self.ends, self.limits = template or ChatTemplate(), ends or {}, limits or Limits()
        self.metrics, self.state_bytes = Metrics(), engine.state_bytes
        self.created = int(time.time())

    def check_name(self, name: str | None) -> None:
        """Raise APIError unless a request names this model, or none."""
        if name is not None and name != self.name:
            raise APIError(
                404,
                f"the model {name[:80]!r} does not exist: this server has {self.name!r}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    def prepare(self, body: CompletionBody | ChatBody, client: str) -> list[Request]:
        """Return the engine's requests for a body, one for each prompt.

        Raises:
            APIError: If an option is out of range.
        """
        self.check_name(body.model)
        state = None if body.previous_state is None else self.states.load(body.previous_state)
        chat = isinstance(body, ChatBody)
        prompts = [self._chat_prompt(body, state)] if isinstance(body, ChatBody) else self._prompts(body)
        for prompt in prompts:
            if len(prompt) > self.limits.prompt:
                raise APIError(
                    400,
                    f"the prompt has {len(prompt)} tokens, and the most is {self.limits.prompt}",
                    param="messages" if chat else "prompt",
                    code="context_length_exceeded",
                )
        n, most = 1 if body.n is None else body.n, min(_MAX_CHOICES, self.engine.slots + self.engine.max_queue)
        if not 1 <= n * len(prompts) <= most:
            number = f"{n} for each of {len(prompts)} prompts" if len(prompts) > 1 else str(n)
            raise APIError(400, f"n must give 1 to {most} choices, got {number}", param="n")
        try:
            return [self._request(body, prompt, _sampling(body), n, client, state) for prompt in prompts]
        except (ValueError, TypeError, OverflowError) as error:
            raise APIError(400, str(error), param=_named_in(str(error), body)) from None

    async def submit(self, requests: Sequence[Request]) -> list[Generation]:
        """Give requests to the engine: all of them, or none.

        Raises:
            APIError: If the queue is full, the server ends, or a request does not fit the model.
        """
        streams: list[Generation] = []
        try:
            for request in requests:
                streams.append(self.engine.submit(request))
            for stream in streams:
                await stream.accepted()
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            raise _refusal(error) from None
        return streams

    def card(self) -> dict[str, Any]:
        """Return the model's entry in the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "longspan",
            "max_model_len": self.engine.max_length,
            "state_bytes": self.state_bytes,
            "fingerprint": self.engine.fingerprint,
            "chat_template": self.template.name,
        }

    def _request(
        self,
        body: CompletionBody | ChatBody,
        prompt: Sequence[int],
        sampling: Sampling,
        n: int,
        client: str,
        state: Session | SavedState | None,
    ) -> Request:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stop) > _MAX_STOP or any(len(text) > 1024 for text in stop):
            raise ValueError(f"stop must be at most {_MAX_STOP} texts of at most 1,024 characters")
        chat = isinstance(body, ChatBody)
        ends = [] if body.ignore_eos else [*self.ends]
        held = 0 if state is None else state.length
        max_tokens = self._max_tokens(body, held + len(prompt))
        if body.keep_state and not max_tokens:
            raise ValueError("keep_state saves the state after an answer: max_tokens must be at least 1, got 0")
        return Request(
            prompt if isinstance(prompt, bytes) else list(prompt),
            max_tokens,
            sampling,
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            n=n,
            stop=[*ends, *(body.stop_token_ids or [])],
            stop_strings=[*stop, *(self.template.ends if chat and not body.ignore_eos else ())],
            logprobs=_logprobs(body),
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            timeout=self._timeout(body.timeout),
            client=client,
            previous_state=state,
            keep_state=bool(body.keep_state),
        )

    def _prompts(self, body: CompletionBody) -> list[Sequence[int]]:
        """Return the tokens of each prompt; bytes where tokens are bytes."""
        given: Any = body.prompt
        if isinstance(given, str):
            return [self._encode(given, "prompt")]
        if not given or isinstance(given[0], int):
            return [given]
        return [self._encode(item, "prompt") if isinstance(item, str) else item for item in given]

    def _chat_prompt(self, body: ChatBody, state: Session | SavedState | None) -> Sequence[int]:
        if not body.messages:
            raise APIError(400, "messages must have at least one message", param="messages")
        messages = []
        for message in body.messages:
            role = "system" if message.role == "developer" else message.role
            named = {} if message.name is None else {"name": message.name}
            messages.append({"role": role, "content": message.text, **named})
        try:
            if state is None:
                return self._encode(self.template.render(messages, add_generation_prompt=True), "messages")
            before = self.codec.decode(state.recent_tokens)
            text = self.template.render_after(messages, before, [*self.ends.values()])
            return self._encode(text, "messages")
        except ValueError as error:
            raise APIError(400, str(error), param="messages") from None

    def _encode(self, text: str, param: str) -> Sequence[int]:
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise APIError(
                400, f"the text is not Unicode: character {error.start} is half a pair", param=param
            ) from None
        return content if self.codec.is_bytes else self.codec.encode(content)

    def _max_tokens(self, body: CompletionBody | ChatBody, held: int) -> int:
        given, limit = body.max_tokens, self.limits.tokens
        if isinstance(body, ChatBody):
            if body.max_completion_tokens is not None and given not in (None, body.max_completion_tokens):
                raise ValueError("max_tokens and max_completion_tokens are one option: give one of them")
            given = body.max_completion_tokens if given is None else given
            if given is None:
                left = math.inf if self.engine.max_length is None else self.engine.max_length - held
                return max(1, int(min(limit, left)))
        given = min(_COMPLETION_TOKENS, limit) if given is None else given
        if not 0 <= given <= limit:
            raise ValueError(f"max_tokens must be from 0 to {limit}, got {given}")
        return given

    def _timeout(self, given: float | None) -> float | None:
        if given is not None and not 0 < given <= 86400:
            raise ValueError(f"timeout must be above 0 and at most 86,400 seconds, got {given}")
        limits = [limit for limit in (given, self.limits.timeout) if limit is not None]
        return min(limits, default=None)


def _sampling(body: CompletionBody | ChatBody) -> Sampling:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return Sampling(**{name: getattr(body, name) for name in names if getattr(body, name) is not None})


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not body.logprobs and body.top_logprobs is not None:
        raise ValueError("top_logprobs needs logprobs: set logprobs to true too")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise ValueError(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {body.top_logprobs}")
    return (body.top_logprobs or 0) if body.logprobs else None


def _named_in(text: str, body: CompletionBody | ChatBody) -> str | None:
    """Return the option that an error begins with."""
    first = text.partition(" ")[0]
    return first if first in type(body).model_fields else None


def _refusal(error: BaseException) -> BaseException:
    """Return what to answer when the engine does not take a request."""
    if isinstance(error, QueueFullError):
        after = {"Retry-After": str(math.ceil(error.retry_after))}
        return APIError(429, str(error), kind="rate_limit_error", code="queue_full", headers=after)
    if isinstance(error, EngineFailedError):
        return APIError(500, "the engine failed", kind="server_error", code="failed")
    if isinstance(error, EngineClosedError):
        return draining()
    if isinstance(error, ValueError | TypeError | OverflowError):
        code = "context_length_exceeded" if "to generate are more than" in str(error) else None
        return APIError(400, str(error), code=code)
    return error


def draining() -> APIError:
    """Return the error while the server ends."""
    text = "the server is shutting down and takes no more requests"
    return APIError(503, text, kind="server_error", code="shutting_down", headers={"Retry-After": "5"})


class TokenNames:
    """Texts of single tokens, for log-probabilities."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def name(self, token: int) -> str:
        """Return the text of a token; its bytes or its number, named as such, where it is no text of its own."""
        if self._codec.is_bytes:
            return chr(token) if token < 128 else f"bytes:\\x{token:02x}"
        text = self._codec.decode([token])
        return f"token_id:{token}" if "\ufffd" in text else text

    def bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None where they are not known."""
        if self._codec.is_bytes:
            return [token]
        text = self._codec.decode([token])
        return None if "\ufffd" in text else list(text.encode())


class ResponseWriter:
    """Formats the deltas of one request, of either kind.

    Args:
        model: The model that answers.
        body: The body of the request.
        requests: The engine's requests for it.
        streams: Their streams.
    """

    def __init__(
        self,
        model: ServedModel,
        body: CompletionBody | ChatBody,
        requests: Sequence[Request],
        streams: Sequence[Generation],
    ) -> None:
        self.model, self.body, self.requests, self.streams = model, body, requests, streams
        self.chat = isinstance(body, ChatBody)
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and body.stream:
            kind = "chat.completion.chunk"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model.name}
        self.n = requests[0].n
        self.begun, self.first = time.monotonic(), None  # type: tuple[float, float | None]
        self._names = TokenNames(model.codec)
        self._offsets: dict[int, StreamDecoder] = {}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens so far."""
        prompt = sum(stream.prompt_tokens for stream in self.streams)
        new = sum(stream.completion_tokens for stream in self.streams)
        cached = sum(stream.cached_tokens for stream in self.streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Iterate over the deltas of all prompts as they come, with the numbers of the prompts.

        Raises:
            APIError: If the engine failed or was closed.
        """
        try:
            if len(self.streams) == 1:
                async for batch in self.streams[0].batches():
                    yield self._seen([(0, delta) for delta in batch])
                return
            async for merged in _merge([stream.batches() for stream in self.streams]):
                yield self._seen(merged)
        except EngineClosedError as error:
            raise _refusal(error) from None
        finally:
            new = sum(stream.completion_tokens for stream in self.streams)
            self.model.metrics.observe(self.first, time.monotonic() - self.begun, new)

    async def events(self) -> AsyncIterator[bytes]:
        """Iterate over server-sent events, several at a time where several have come."""
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        # All chunks begin and end alike: only what is between is encoded for each.
        begin, end = f'data: {_encode(self.head)[:-1]},"choices":[', "]" + ',"usage":null' * with_usage + "}\n\n"
        if self.chat:
            opening = [self._stream_choice(i, {"role": "assistant", "content": ""}) for i in range(self.n)]
            yield "".join(begin + _encode(choice) + end for choice in opening).encode()
        try:
            async for batch in self.deltas():
                parts = []
                for prompt, delta in _joined(batch):
                    choice = self._chunk(prompt * self.n + delta.index, delta)
                    if delta.session is not None:
                        choice |= await self._state(delta.session)
                    parts.append(begin + _encode(choice) + end)
                yield "".join(parts).encode()
        except APIError as error:
            yield _event(error.body())
            return
        if with_usage:
            yield _event({**self.head, "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    async def result(self) -> dict[str, Any]:
        """Wait for the end and return the response.

        Raises:
            APIError: If the engine failed or was closed.
        """
        found = [Completion() for _ in range(self.n * len(self.streams))]
        async for batch in self.deltas():
            for prompt, delta in batch:
                found[prompt * self.n + delta.index].add(delta)
        choices = []
        for i, completion in enumerate(found):
            choice: dict[str, Any] = {"index": i}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
            else:
                choice["text"] = completion.text
            choice["logprobs"] = self._logs(i, completion.tokens, completion.log_probabilities, completion.top)
            choice["finish_reason"] = completion.finish_reason
            choices.append(choice | await self._state(completion.session))
        return {**self.head, "choices": choices, "usage": self.usage()}

    def cancel(self) -> None:
        """End all streams."""
        for stream in self.streams:
            stream.cancel()

    def _seen(self, batch: list[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
        if self.first is None and any(delta.tokens and not delta.prompt for _, delta in batch):
            self.first = time.monotonic() - self.begun
        if any(delta.finish_reason == "cancelled" for _, delta in batch):
            raise draining()
        return batch

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        logs = self._logs(index, delta.tokens, delta.log_probabilities, delta.top)
        if self.chat:
            content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
            return self._stream_choice(index, content, logs, delta.finish_reason)
        return {"index": index, "text": delta.text, "logprobs": logs, "finish_reason": delta.finish_reason}

    @staticmethod
    def _stream_choice(
        index: int, delta: dict[str, str], logs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logs, "finish_reason": reason}

    async def _state(self, session: Session | str | None) -> dict[str, str]:
        if isinstance(session, Session):
            assert isinstance(self.model.states, StateStore)
            session = (await asyncio.to_thread(self.model.states.save, session)).name
        return {} if session is None else {"state": session}

    def _logs(
        self, index: int, tokens: Sequence[int], values: Sequence[float | None], top: Sequence[dict[int, float]]
    ) -> dict[str, Any] | None:
        if self.requests[0].logprobs is None:
            return None
        if self.chat:
            pairs = zip(tokens, values, top, strict=True)
            return {"content": [self._token(token, log, best) for token, log, best in pairs], "refusal": None}
        decoder = self._offsets.setdefault(index, self.model.codec.stream_decoder())
        offsets = []
        for token in tokens:
            offsets.append(len(decoder.text))
            decoder.push(token)
        named = [{self._names.name(token): log for token, log in best.items()} or None for best in top]
        return {
            "tokens": [self._names.name(token) for token in tokens],
            "token_logprobs": list(values),
            "top_logprobs": named,
            "text_offset": offsets,
        }

    def _token(self, token: int, log: float | None, best: dict[int, float] | None) -> dict[str, Any]:
        entry: dict[str, Any] = {"token": self._names.name(token), "logprob": log, "bytes": self._names.bytes(token)}
        if best is not None:
            entry["top_logprobs"] = [self._token(other, value, None) for other, value in best.items()]
        return entry


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body).encode() + b"\n\n"


def _joined(batch: list[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    """Join deltas of the same choice that came together, unless they are the prompt's."""
    if len(batch) == 1:
        return batch
    found: dict[tuple[int, int, bool], list[Delta]] = {}
    for prompt, delta in batch:
        found.setdefault((prompt, delta.index, delta.prompt), []).append(delta)
    return [(prompt, _join(several)) for (prompt, _, _), several in found.items()]


def _join(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        last.index,
        [token for delta in deltas for token in delta.tokens],
        "".join(delta.text for delta in deltas),
        [log for delta in deltas for log in delta.log_probabilities],
        [top for delta in deltas for top in delta.top],
        last.finish_reason,
        last.session,
        last.prompt,
    )


async def _merge(streams: Sequence[AsyncIterator[list[Delta]]]) -> AsyncIterator[list[tuple[int, Delta]]]:
    """Iterate over several streams as their deltas come."""
    merged: asyncio.Queue[list[tuple[int, Delta]] | BaseException | None] = asyncio.Queue()

    async def follow(number: int, stream: AsyncIterator[list[Delta]]) -> None:
        try:
            async for batch in stream:
                merged.put_nowait([(number, delta) for delta in batch])
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await merged.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
