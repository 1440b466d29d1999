"""The engine: continuous batching over a fixed number of slots, from one thread that owns the device.

The thread alternates between reading one chunk of a prompt and one decode step of all slots, so that no stream waits
longer than a chunk takes. Every call has the same shapes whatever else runs, and rows do not mix: with the number of
slots fixed, the tokens and log-probabilities of a request are the same bits alone and among any others.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from longspan.generation.decode import is_small
from longspan.generation.session import Session, check_tokens, fingerprint, to_tokens
from longspan.generation.tokenization import StreamDecoder, TextCodec
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.serve.disk_store import DiskStore
from longspan.serve.prefix_cache import CacheStats, PrefixCache, token_tensors
from longspan.serve.request import Delta, Generation, Request
from longspan.serve.slots import REPETITION_WINDOW, SlotLoop
from longspan.serve.state_codec import StateCodec
from longspan.utils import check_integer

_SMALL_CHUNK, _CHUNK = 64, 512  # tokens per chunk of a prompt
_SMALL_MODEL = 1 << 22  # parameters up to which the smaller chunk is used
_MAX_LENGTH = 4096  # default capacity of a slot, for models that store every token
_LONGEST = 1 << 31


class QueueFullError(RuntimeError):
    """Too many requests are waiting.

    Attributes:
        retry_after: Seconds after which a place is expected to be free.
    """

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting, and the limit is {limit}: try again later")
        self.retry_after = retry_after


class EngineClosedError(RuntimeError):
    """The engine takes no more requests, or failed."""


@dataclass
class EngineStats:
    """Counters of an engine since it started.

    Attributes:
        requests: Requests accepted.
        finished: Choices that ended, by reason.
        waiting: Choices that wait for a slot.
        reading: Prompts that are being read.
        running: Choices that are being decoded.
        slots: Number of slots.
        prompt_tokens: Tokens of prompts that were read, without those found in the cache.
        completion_tokens: Tokens generated.
        steps: Decode steps.
        chunks: Chunks of prompts that were read.
        cache: Counters of the prefix cache.
        state_bytes: Bytes of one slot's state.
    """

    requests: int
    finished: dict[str, int]
    waiting: int
    reading: int
    running: int
    slots: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    chunks: int
    cache: CacheStats
    state_bytes: int


class _Reading:
    """A prompt that is being read, all but its last token; shared by the choices of a request."""

    def __init__(self, request: Request, keys: list[bytes]) -> None:
        self.tokens = request.tokens[:-1]
        self.keys, self.own = keys, []  # type: tuple[list[bytes], list[bytes]]
        self.position = 0
        self.state: StackState | None = None
        self.logits: Tensor | None = None  # of a session that nothing is read after
        self.logs: list[tuple[float, dict[int, float]]] = []  # of the prompt's tokens from the second on

    @property
    def done(self) -> bool:
        return self.position == len(self.tokens)


class _Choice:
    """A continuation of a request's prompt."""

    def __init__(self, job: _Job, index: int, decoder: StreamDecoder | None) -> None:
        self.job, self.index, self.decoder = job, index, decoder
        self.row: int | None = None
        self.tokens: list[int] = []
        self.held = ""  # text that may be the beginning of a stop string
        self.running = self.finished = self.finished_text = False


class _Job:
    """A request with its stream and its choices."""

    def __init__(self, request: Request, generation: Generation, reading: _Reading, deadline: float) -> None:
        self.request, self.generation, self.reading, self.deadline = request, generation, reading, deadline
        self.choices: list[_Choice] = []
        self.stop = frozenset(to_tokens("stop", request.stop).tolist())
        self.started = 0.0


class Engine:
    """Decodes requests together, as they come and end.

    The model is put in eval mode and must not be changed while the engine runs.

    Args:
        model: A causal language model.
        codec: Text of the tokens; bytes for a model with 256 tokens. Without one there is no text and no stop string.
        slots: The number of choices that are decoded together. Results depend on it in rounding, and on nothing else
            that runs.
        max_queue: The most choices that wait for a slot.
        chunk: Tokens per chunk of a prompt, and between the states of the prefix cache: 64 for small models, otherwise
            512, unless given.
        max_length: The most tokens of a prompt and its continuation. By default the model's limit; 4096 if it has
            layers that store every token (softmax), whose slots are of this size.
        cache_bytes: Budget of the prefix cache; 0 for none.
        cache_dir: Folder for the prefix cache on disk, which survives the process.
        disk_bytes: Budget of that folder.
        state_dtype: "exact", or "bfloat16" or "int8" for states in the prefix cache that take a half or a quarter of
            the bytes. States are then rounded at every chunk boundary, cached or not, so that a hit changes no bit.
        threads: Number of PyTorch threads on a CPU: one for small models, otherwise PyTorch's own number.

    Raises:
        ValueError: If the model is not causal, or an argument is out of range.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        codec: TextCodec | None = None,
        slots: int = 8,
        max_queue: int = 256,
        chunk: int | None = None,
        max_length: int | None = None,
        cache_bytes: int = 1 << 30,
        cache_dir: str | Path | None = None,
        disk_bytes: int = 1 << 34,
        state_dtype: str = "exact",
        threads: int | None = None,
    ) -> None:
        if not isinstance(model, LanguageModel):
            raise TypeError(f"model must be a LanguageModel, got a {type(model).__name__}")
        if not model.config.causal:
            raise ValueError("only a causal model can generate: build it with causal=True")
        limits = {"slots": (slots, 1), "max_queue": (max_queue, 0), "cache_bytes": (cache_bytes, 0)}
        limits["disk_bytes"] = disk_bytes, 0
        limits |= {
            name: (x, 1) for name, x in (("chunk", chunk), ("max_length", max_length), ("threads", threads)) if x
        }
        for name, (value, minimum) in limits.items():
            check_integer(name, value, minimum)
        if codec is not None and not codec.fits(model.config.vocab_size):
            raise ValueError(f"codec does not fit the {model.config.vocab_size} tokens of the model")
        if codec is None and model.config.vocab_size == 256:
            codec = TextCodec(None)
        self.model, self.codec, self.slots, self.max_queue = model.eval(), codec, slots, max_queue
        self.device = next(model.parameters()).device
        small = sum(x.numel() for x in model.parameters()) <= _SMALL_MODEL
        self.chunk = (_SMALL_CHUNK if small else _CHUNK) if chunk is None else chunk
        self.max_length = self._find_limit(max_length)
        self.fingerprint = fingerprint(model)
        self.state_codec = StateCodec(state_dtype)
        disk = None if cache_dir is None else DiskStore(Path(cache_dir), disk_bytes)
        self._rows, self._threads = self._layout(threads)
        # What the bits of a state depend on.
        salt = f"{self.fingerprint}:{model.config}:{self.chunk}:{self.max_length}:{state_dtype}"
        salt += f":{self.device}:{self._threads}:{torch.__version__}"
        self.cache = PrefixCache(
            self._new_state, self.chunk, cache_bytes, salt.encode(), codec=self.state_codec, disk=disk
        )
        self._wake = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Choice]] = OrderedDict()  # by client
        self._num_waiting = 0
        self._cancelled: set[Generation] = set()
        self._jobs: dict[Generation, _Job] = {}
        self._deadlines: list[tuple[float, int, Generation]] = []
        self._number = count()
        self._free = list(range(slots))[::-1]
        self._reading: deque[_Job] = deque()
        self._running: dict[int, _Choice] = {}
        self._wakeups: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self._closing = False
        self._error: BaseException | None = None
        self._counts = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "steps": 0, "chunks": 0}
        self._finished: dict[str, int] = {}
        self._mean_seconds = 1.0
        self._start_thread()

    def submit(self, request: Request) -> Generation:
        """Queue a request.

        Returns:
            Its stream.

        Raises:
            ValueError: If the request does not fit the model.
            QueueFullError: If too many choices are waiting.
            EngineClosedError: If the engine was closed.
        """
        self._check(request)
        deadline = math.inf if request.timeout is None else time.monotonic() + request.timeout
        session = request.previous_state
        # Log-probabilities of the prompt need all of it to be read.
        cached = session is None and not (request.echo and request.logprobs is not None) and self.cache.budget > 0
        reading = _Reading(request, self.cache.keys(request.tokens[:-1]) if cached else [])
        generation = Generation(request, self._cancel)
        job = _Job(request, generation, reading, deadline)
        for i in range(request.n):
            job.choices.append(_Choice(job, i, None if self.codec is None else self.codec.stream_decoder()))
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed: it takes no more requests") from self._error
            if self._num_waiting + request.n > self.max_queue + len(self._free):
                raise QueueFullError(self._num_waiting, self.max_queue, self._retry_after())
            self._jobs[generation] = job
            self._waiting.setdefault(request.client, deque()).extend(job.choices)
            self._num_waiting += request.n
            self._counts["requests"] += 1
            if deadline < math.inf:
                heapq.heappush(self._deadlines, (deadline, next(self._number), generation))
            self._wake.notify()
        return generation

    def stats(self) -> EngineStats:
        """Return the counters."""
        disk = self.cache.disk
        with self._wake:
            return EngineStats(
                finished=dict(self._finished),
                waiting=self._num_waiting,
                reading=len(self._reading),
                running=len(self._running),
                slots=self.slots,
                cache=replace(self.cache.stats, disk_bytes=0 if disk is None else disk.bytes),
                state_bytes=sum(x.numel() * x.element_size() for x in self._new_state().tensors().values()),
                **self._counts,
            )

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, end and wait for the thread.

        Args:
            drain: Whether requests that were accepted are finished first; otherwise they are cancelled.
            timeout: Seconds after which those left are cancelled.
        """
        with self._wake:
            self._closing = True
            if not drain:
                self._cancelled |= set(self._jobs)
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.close(drain=False)
        self.cache.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def _check(self, request: Request) -> None:
        """Raise ValueError unless the model can answer a request."""
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got a {type(request).__name__}")
        check_tokens("prompt", request.tokens, self.model)
        check_tokens("stop", to_tokens("stop", request.stop), self.model)
        if request.stop_strings and self.codec is None:
            raise ValueError("stop_strings need text, and this engine has no codec: use stop, with tokens")
        if request.sampling.repetition_window > REPETITION_WINDOW:
            window = request.sampling.repetition_window
            raise ValueError(f"repetition_window must be at most {REPETITION_WINDOW} here, got {window}")
        held = 0
        if request.previous_state is not None:
            request.previous_state.check_model(self.model)
            state = request.previous_state.state
            if state.start is not None or [*state.tensors()] != [*self._new_state().tensors()]:
                raise ValueError("previous_state does not fit this model: it is no state of it from position 0")
            held = int(state.length)
        total = held + len(request.tokens) + request.max_tokens
        if self.max_length is not None and total > self.max_length:
            raise ValueError(
                f"{held + len(request.tokens)} tokens of prompt and {request.max_tokens} to generate are more than the "
                f"{self.max_length} that fit: shorten the prompt, or lower max_tokens"
            )

    def _find_limit(self, max_length: int | None) -> int | None:
        """Return the most tokens of a sequence, None for any number."""
        low, high = 0, _LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._holds(middle) else (low, middle - 1)
        if max_length is not None:
            if max_length > low:
                raise ValueError(f"max_length must be at most {low}, the model's limit, got {max_length}")
            return max_length
        stores_tokens = any(token_tensors(self.model.new_state(1), ""))
        if stores_tokens:
            return min(low, _MAX_LENGTH)
        return None if low == _LONGEST else low

    def _holds(self, length: int) -> bool:
        """Return whether the model can read `length` tokens."""
        stack = self.model.transformer.stack
        try:
            if self.model.positions is not None:
                self.model.positions.check(length)
            for i, layer in stack.attention_layers():
                layer.mechanism.check_length(-(-length // stack._branches()[i].stride))
        except ValueError:
            return False
        return True

    def _layout(self, threads: int | None) -> tuple[int, int]:
        """Return the number of rows of a step, and of PyTorch threads."""
        default = torch.get_num_threads()
        if self.device.type != "cpu":
            return self.slots, threads or default
        # In products of other numbers of rows than multiples of four, the last ones may be summed in another order.
        rows = self.slots if self.slots == 1 else -(-self.slots // 4) * 4
        elements = rows * sum(x.numel() for x in self._new_state().tensors().values())
        return rows, threads or (1 if is_small(self.model, rows, elements) else default)

    def _new_state(self) -> StackState:
        return self.model.new_state(1, max_length=self.max_length)

    def _retry_after(self) -> float:
        return max(1.0, math.ceil(self._mean_seconds * (1 + self._num_waiting / self.slots)))

    def _cancel(self, generation: Generation) -> None:
        with self._wake:
            self._cancelled.add(generation)
            self._wake.notify()

    def _start_thread(self) -> None:
        ready, threads = threading.Event(), torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, args=(ready,), name="longspan-engine", daemon=True)
        self._thread.start()
        ready.wait()
        # The engine's thread has set its own number, which also is the one that later threads begin with.
        torch.set_num_threads(threads)
        if self._error is not None:
            raise self._error

    @torch.inference_mode()
    def _work(self, ready: threading.Event) -> None:
        try:
            try:
                self._prepare()
            finally:
                ready.set()
            while self._wait():
                self._read()
                self._step()
                self._notify()
        except BaseException as error:
            self._fail(error)

    def _prepare(self) -> None:
        """Allocate the slots, and run the steps that a CUDA graph is captured after."""
        torch.set_num_threads(self._threads)
        rows = self._rows
        self._loop = SlotLoop(self.model, rows, self.max_length)
        for _ in range(5 if self.device.type == "cuda" else 1):
            self._loop.step()
        self._empty = self._new_state()
        self._idle = [0] * rows  # steps since a row was emptied
        for row in range(rows):
            self._loop.put(row, self._empty, 0)

    def _wait(self) -> bool:
        """Wait for work and take it; return False at the end."""
        with self._wake:
            while not (self._num_waiting or self._reading or self._running or self._cancelled):
                if self._closing:
                    return False
                self._wake.wait()
            now = time.monotonic()
            while self._deadlines and self._deadlines[0][0] <= now:
                self._end_job(heapq.heappop(self._deadlines)[2], "timeout")
            for generation in self._cancelled:
                self._end_job(generation, "cancelled")
            self._cancelled.clear()
            admitted = list(self._admissible())
        for choice in admitted:
            self._admit(choice)
        self._notify()
        return True

    def _admissible(self) -> Iterator[_Choice]:
        """Give free slots to waiting choices; clients take turns."""
        while self._free and self._waiting:
            client, choices = self._waiting.popitem(last=False)
            choice = choices.popleft()
            if choices:
                self._waiting[client] = choices
            self._num_waiting -= 1
            choice.row = self._free.pop()
            yield choice

    def _admit(self, choice: _Choice) -> None:
        job = choice.job
        if not job.started:
            job.started = time.monotonic()
            self._begin(job)
        if job.reading.done:
            self._start(choice)

    def _begin(self, job: _Job) -> None:
        """Set the state that a prompt is read from: empty, from the cache, or that of a session."""
        reading, session = job.reading, job.request.previous_state
        if session is not None:
            reading.state = self._fit(session.state)
            if not len(job.request.tokens):
                reading.logits = session.logits.to(self.device)
        elif job.request.max_tokens or job.request.echo:
            depth, reading.state = self.cache.find(reading.keys)
            reading.position = depth * self.chunk
            self.cache.count(len(reading.tokens), reading.position)
            job.generation.cached_tokens = reading.position
        else:
            reading.position = len(reading.tokens)
        if reading.state is None:
            reading.state = self._new_state()
        if not reading.done:
            self._reading.append(job)

    def _fit(self, state: StackState) -> StackState:
        """Copy a state of one sequence to one of this engine's capacity."""
        fitted, length = self._new_state(), int(state.length)
        own, tokens = fitted.tensors(), set(token_tensors(state, ""))
        for name, x in state.tensors().items():
            if name in tokens:
                own[name][:, :, :length].copy_(x[:, :, :length])
            else:
                own[name].copy_(x)
        return fitted

    def _read(self) -> None:
        """Read one chunk of one prompt; prompts take turns."""
        if not self._reading:
            return
        job = self._reading.popleft()
        reading, C = job.reading, self.chunk
        assert reading.state is not None
        depth = reading.position // C
        if depth < len(reading.keys) and self.cache.has(reading.keys[depth]):
            # Another prompt has been read that far meanwhile.
            depth, reading.state = self.cache.find(reading.keys)
            reading.position = depth * C
        else:
            self._read_chunk(job, reading.state)
        if not reading.done:
            self._reading.append(job)
            return
        if reading.keys:
            self.cache.persist(reading.keys[-1])
        for choice in job.choices:
            if choice.row is not None and not choice.finished:
                self._start(choice)

    def _read_chunk(self, job: _Job, state: StackState) -> None:
        reading, C = job.reading, self.chunk
        start, stop = reading.position, min(reading.position + C, len(reading.tokens))
        tokens = torch.zeros(1, C, dtype=torch.int64)
        tokens[0, : stop - start] = reading.tokens[start:stop]
        mask = None if stop - start == C else torch.arange(C, device=self.device)[None] < stop - start
        hidden, reading.state = self.model.extend_hidden(tokens.to(self.device), state, key_mask=mask)
        reading.position = stop
        self._counts["chunks"] += 1
        self._counts["prompt_tokens"] += stop - start
        if job.request.echo and job.request.logprobs is not None:
            logs = self.model.logits(hidden)[0, : stop - start].float().log_softmax(1)
            reading.logs += _top_logs(
                logs, job.request.tokens[start + 1 : stop + 1].to(self.device), job.request.logprobs
            )
        if stop % C == 0:
            self.state_codec.round(reading.state)
        if stop % C == 0 and reading.keys:
            self.cache.insert(reading.keys, stop // C, reading.state, reading.own)

    def _start(self, choice: _Choice) -> None:
        """Put a choice whose prompt has been read into its slot."""
        job, row = choice.job, choice.row
        request, reading = job.request, job.reading
        assert row is not None
        assert reading.state is not None
        if request.echo:
            self._echo(choice)
        if not request.max_tokens:
            self._finish(choice, "length")
            return
        before = (
            request.tokens
            if request.previous_state is None
            else torch.cat([x[x >= 0] for x in (request.previous_state.recent[0].cpu(), request.tokens)])
        )
        self._loop.sampler.put(row, request.sampling, request.seed + choice.index, before[:-1])
        last = int(before[-1]) if len(before) else 0
        self._loop.put(row, reading.state, last, reading.logits)
        self._running[row] = choice
        choice.running = True
        if all(other.running or other.finished for other in job.choices):
            reading.state = None

    def _step(self) -> None:
        """Decode one token of every running choice."""
        if not self._running:
            return
        self._refresh_idle()
        self._loop.step()
        self._counts["steps"] += 1
        running = list(self._running.items())
        numbers = [choice.job.request.logprobs for _, choice in running]
        logs: list[tuple[float, dict[int, float]]] = []
        if any(number is not None for number in numbers):
            every = self._loop.logits.float().log_softmax(1)
            logs = _top_logs(every, self._loop.token, max(number or 0 for number in numbers))
        tokens = self._loop.token.tolist()
        for row, choice in running:
            log, top = logs[row] if choice.job.request.logprobs is not None else (None, None)
            if top is not None:
                top = dict(list(top.items())[: choice.job.request.logprobs])
            self._emit(choice, tokens[row], log, top)

    def _refresh_idle(self) -> None:
        """Empty rows that idle, before their lengths, which grow with each step, exceed what the model can hold."""
        if self.max_length is None:
            return
        for row, steps in enumerate(self._idle):
            if row not in self._running:
                self._idle[row] = steps + 1
                if steps + 1 > self.max_length:
                    self._loop.put(row, self._empty, 0)
                    self._idle[row] = 1

    def _emit(self, choice: _Choice, token: int, log: float | None, top: dict[int, float] | None) -> None:
        """Send a token of a choice, and end it if it is the last one."""
        request = choice.job.request
        choice.tokens.append(token)
        if token in choice.job.stop:
            self._finish(choice, "stop")
            return
        choice.job.generation.completion_tokens += 1
        self._counts["completion_tokens"] += 1
        text, reason = self._text(choice, token), None
        if choice.finished_text:
            reason = "stop"
        elif len(choice.tokens) == request.max_tokens:
            reason = "length"
        delta = Delta(choice.index, token, text, log, top)
        if reason is None:
            self._push(choice, delta)
        else:
            self._finish(choice, reason, delta)

    def _text(self, choice: _Choice, token: int) -> str:
        """Return the text that a token makes certain; note whether a stop string ends it."""
        if choice.decoder is None:
            return ""
        text = choice.held + choice.decoder.push(token)
        stops = choice.job.request.stop_strings
        if not stops:
            return text
        found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        if found:
            choice.held, choice.finished_text = "", True
            return text[: min(found)]
        longest = max(len(stop) for stop in stops) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in stops):
                choice.held = text[start:]
                return text[:start]
        choice.held = ""
        return text

    def _echo(self, choice: _Choice) -> None:
        request, reading = choice.job.request, choice.job.reading
        decoder = None if self.codec is None else self.codec.stream_decoder()
        tokens = request.tokens.tolist()
        for i, token in enumerate(tokens):
            text = "" if decoder is None else decoder.push(token)
            if decoder is not None and i == len(tokens) - 1:
                text += decoder.flush()
            log, top = reading.logs[i - 1] if i and reading.logs else (None, None)
            self._push(choice, Delta(choice.index, token, text, log, top, prompt=True))

    def _finish(self, choice: _Choice, reason: str, delta: Delta | None = None) -> None:
        """End a choice, free its slot and send its last delta."""
        delta = Delta(choice.index) if delta is None else delta
        session = None
        if choice.running and choice.job.request.keep_state and choice.tokens:
            session = self._session(choice)
        text = delta.text
        if choice.decoder is not None and not choice.finished_text:
            text += choice.held + choice.decoder.flush()
        choice.finished = True
        self._push(choice, replace(delta, text=text, finish_reason=reason, session=session))
        with self._wake:
            self._finished[reason] = self._finished.get(reason, 0) + 1
            if choice.row is not None:
                if choice.running:
                    del self._running[choice.row]
                    self._loop.sampler.release(choice.row)
                    self._loop.put(choice.row, self._empty, 0)
                    self._idle[choice.row] = 0
                    seconds = time.monotonic() - choice.job.started
                    self._mean_seconds += 0.05 * (seconds - self._mean_seconds)
                self._free.append(choice.row)
            if all(other.finished for other in choice.job.choices):
                self._jobs.pop(choice.job.generation, None)

    def _session(self, choice: _Choice) -> Session:
        """Return the state after all tokens of a running choice, to be continued."""
        assert choice.row is not None
        state, _ = self._loop.take(choice.row)
        token = torch.tensor([[choice.tokens[-1]]], device=self.device)
        logits, state = self.model.extend(token, state)
        recent = torch.cat([self._loop.sampler.recent[choice.row], token[0]])[None, -64:]
        with torch.inference_mode(False):  # Tensors that may be used outside this thread.
            return Session(state.clone(), logits[:, -1].clone(), recent.clone(), self.model)

    def _end_job(self, generation: Generation, reason: str) -> None:
        """End every choice of a request, wherever it is."""
        job = self._jobs.get(generation)
        if job is None:
            return
        waiting = self._waiting.get(job.request.client, deque())
        for choice in job.choices:
            if choice.finished:
                continue
            if choice.row is None:
                waiting.remove(choice)
                self._num_waiting -= 1
            self._finish(choice, reason)
        if not waiting:
            self._waiting.pop(job.request.client, None)
        if job in self._reading:
            self._reading.remove(job)

    def _push(self, choice: _Choice, item: Delta | BaseException) -> None:
        waiter = choice.job.generation.push(item)
        if waiter is not None:
            self._wakeups.setdefault(waiter[0], []).append(waiter[1])

    def _notify(self) -> None:
        """Wake the event loops whose streams got deltas, each once."""
        for loop, futures in self._wakeups.items():
            with suppress(RuntimeError):  # The loop was closed: nobody waits.
                loop.call_soon_threadsafe(_resolve, futures)
        self._wakeups = {}

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._error, self._closing = error, True
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            failure = EngineClosedError(f"the engine failed: {error}")
            failure.__cause__ = error
            self._push(job.choices[0], failure)
        self._notify()


def _top_logs(logs: Tensor, tokens: Tensor, number: int) -> list[tuple[float, dict[int, float]]]:
    """Return the log-probability of each row's token, and its `number` likeliest tokens with theirs."""
    own = logs.gather(1, tokens[:, None])[:, 0].tolist()
    best = logs.topk(min(number, logs.shape[1]), 1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(log, dict(zip(names, values, strict=True))) for log, (names, values) in zip(own, pairs, strict=True)]


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
