"""The engine: continuous batching over a fixed number of slots, from one thread that owns the device.

The thread alternates between reading chunks of prompts and decode steps of all slots, so that no stream waits longer
than a few chunks take. Every call has the same shapes whatever else runs, and rows do not mix: with the number of slots
fixed, the tokens and log-probabilities of a request are the same bits alone and among any others.

On a GPU a chunk of several prompts, a step with its sampling, and the beginning of several rows are one CUDA graph
each. Steps are launched in blocks, and the host takes the tokens of a block while the next one runs.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.generation.decode import is_small
from longspan.generation.session import Session, check_tokens, fingerprint, to_tokens
from longspan.generation.tokenization import StreamDecoder, TextCodec
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.serve.disk_store import DiskStore
from longspan.serve.prefix_cache import CacheStats, PrefixCache, token_tensors
from longspan.serve.request import Delta, Generation, Request, SavedState, Waiter, wake_all
from longspan.serve.slots import REPETITION_WINDOW, CapturedReader, ChunkShape, PromptReader, SlotLoop, StateLayout
from longspan.serve.speculation import BYTES_NGRAM, MAX_DRAFT, NGRAM, DraftModel, NgramProposer, SpeculationBudget
from longspan.serve.state_codec import StateCodec
from longspan.utils import check_integer, choose

_SMALL_CHUNK, _CHUNK = 64, 512  # tokens per chunk of a prompt
_SMALL_MODEL = 1 << 22  # parameters up to which the smaller chunk is used
_MAX_LENGTH = 4096  # default capacity of a slot, for models that store every token
_LONGEST = 1 << 31
_MODEL_DRAFT = 4  # tokens that a draft model proposes at a time
_READ_TOKENS, _READ_CHUNKS = 1024, 8  # tokens that are read together on a GPU, and short chunks on a CPU
_READ_BYTES, _MOST_AHEAD = 1 << 30, 64  # bytes of states, and choices, that are read together or ahead of free slots
_MOST_TURNS = 4096  # clients whose turns are remembered
_BLOCK_SECONDS, _BLOCK_STEPS = 0.008, 32  # steps on a GPU are launched in blocks of about this time
_BLOCK_SECONDS_PER_STREAM = 0.00009  # with many streams: the host takes less time for the tokens of a block than this
_STEPS_PER_CHUNK = 4  # steps in a block for each chunk that is read before it
_PACE_SECONDS, _PACE_SECONDS_PER_STREAM = (0.01, 0.1), 0.0025  # between wake-ups of an event loop by one choice
_WAKE_SECONDS = 0.02  # between wake-ups of an event loop by different choices: those that are due meanwhile wait


class QueueFullError(RuntimeError):
    """Too many requests are waiting.

    Attributes:
        retry_after: Seconds after which a place is expected to be free.
    """

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting, and the limit is {limit}: try again later")
        self.waiting, self.limit, self.retry_after = waiting, limit, retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return QueueFullError, (self.waiting, self.limit, self.retry_after)


class EngineClosedError(RuntimeError):
    """The engine takes no more requests, or failed."""


class EngineFailedError(EngineClosedError):
    """The engine failed."""


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
        guessed_tokens: Draft tokens of speculation.
        accepted_tokens: Draft tokens that were accepted.
        decode_seconds: Time that the device has spent on decode steps.
        prefill_seconds: Time that it has spent on chunks of prompts.
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
    guessed_tokens: int
    accepted_tokens: int
    decode_seconds: float
    prefill_seconds: float
    cache: CacheStats
    state_bytes: int


class _Reading:
    """A prompt that is being read, all but its last token; shared by the choices of a request."""

    def __init__(self, request: Request, keys: list[bytes]) -> None:
        self.tokens = request.tokens[:-1]
        self.keys, self.own = keys, []  # type: tuple[list[bytes], list[bytes]]
        self.position = 0
        self.state: Tensor | None = None  # packed
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
        self.steps = 0  # that were launched for it
        self.proposer: NgramProposer | None = None
        self.held = ""  # text that may be the beginning of a stop string
        self.unsent: list[int] = []  # tokens that wait for others
        self.due = 0.0  # when the next ones are sent
        self.running = self.finished = self.stopped = False

    @property
    def steps_left(self) -> int:
        """Steps until its last token at most."""
        return self.job.request.max_tokens - self.steps


class _Job:
    """A request with its stream and its choices."""

    def __init__(self, request: Request, generation: Generation, reading: _Reading, held: int) -> None:
        self.request, self.generation, self.reading = request, generation, reading
        self.length = held + len(request.tokens)  # of the prompt, with what a session holds
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
        read_rows: The number of prompts whose chunks are read together; unless given, on a GPU as many as have 1024
            tokens, or 4096 where as many wait, and on a CPU up to 8 if they are short.
        steps_per_sync: Decode steps launched before their tokens are read back. Unless given 1 on a CPU, and on a GPU
            as many as take about 8 ms, at most 32.
        speculation: "ngram" takes draft tokens from the prompt and what was generated; a causal language model is a
            draft model. They are verified together, only where that saves time. The distribution of the output is
            unchanged; its rounding, and so a tie, may depend on what else runs.
        threads: Number of PyTorch threads on a CPU. Unless given, one for small models; otherwise prompts are read with
            PyTorch's own number, and steps have one less, if that is more than one. A step is many short operations,
            each of which waits for its slowest thread, and an HTTP server and its clients need a core too.
        warm_up: Whether reading several prompts together on a CPU is compared with reading them one by one before the
            first request, which takes up to a second, and not when as many prompts come for the first time.

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
        read_rows: int | None = None,
        steps_per_sync: int | None = None,
        speculation: str | LanguageModel | None = None,
        threads: int | None = None,
        warm_up: bool = False,
    ) -> None:
        if not isinstance(model, LanguageModel):
            raise TypeError(f"model must be a LanguageModel, got a {type(model).__name__}")
        if not model.config.causal:
            raise ValueError("only a causal model can generate: build it with causal=True")
        for name, limit in (("max_queue", max_queue), ("cache_bytes", cache_bytes), ("disk_bytes", disk_bytes)):
            check_integer(name, limit, 0)
        counts = {"slots": slots, "chunk": chunk, "max_length": max_length, "threads": threads}
        for name, number in {**counts, "read_rows": read_rows, "steps_per_sync": steps_per_sync}.items():
            if number is not None:
                check_integer(name, number, 1)
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
        self._layout = StateLayout(self._new_state())
        self.state_codec = StateCodec(state_dtype)
        disk = None if cache_dir is None else DiskStore(Path(cache_dir), disk_bytes)
        self._rows, self._threads, self._read_threads = self._rows_and_threads(threads)
        on_gpu = self.device.type == "cuda"
        held = max(1, _READ_BYTES // self._layout.bytes)  # states
        most = min(slots, _READ_TOKENS // self.chunk) if on_gpu else _READ_CHUNKS
        self._read_rows = read_rows or max(1, min(most, held))
        self._grow_reads = read_rows is None
        self._most_ahead = min(_MOST_AHEAD, held)
        self._steps_per_sync = steps_per_sync or (None if on_gpu and speculation is None else 1)
        self._step_seconds = _BLOCK_SECONDS / 4
        self.speculation, self._budget = _check_speculation(speculation, model), SpeculationBudget()
        # What the bits of a state depend on.
        salt = f"{self.fingerprint}:{model.config}:{self.chunk}:{self.max_length}:{state_dtype}"
        salt += f":{self._read_rows}:{self.device}:{self._read_threads}:{torch.__version__}"
        self.cache = PrefixCache(
            self._layout,
            self.chunk,
            cache_bytes,
            salt.encode(),
            vocab_size=model.config.vocab_size,
            codec=self.state_codec,
            disk=disk,
        )
        self._wake = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Choice]] = OrderedDict()  # by client
        self._num_waiting = 0
        self._cancelled: set[Generation] = set()
        self._jobs: dict[Generation, _Job] = {}
        self._deadlines: list[tuple[float, int, Generation]] = []
        self._number = count()
        self._free = list(range(slots))[::-1]
        self._ahead: list[_Choice] = []  # admitted, and without a slot
        self._turns: dict[str, int] = {}  # when a client got a slot last
        self._reading: deque[_Job] = deque()
        self._may_read = False  # whether anything has changed since no prompt was to be read
        self._starting: list[_Choice] = []
        self._running: dict[int, _Choice] = {}
        self._launched: deque[_Launched] = deque()
        self._reads: deque[_DeviceTimer] = deque()  # calls of the reader whose time has not been counted
        self._wakeups: dict[Generation, Waiter] = {}  # streams with deltas that something waits for
        self._due: set[Generation] = set()  # those to wake now
        self._closing = False
        self._error: BaseException | None = None
        counted = "requests prompt_tokens completion_tokens steps chunks guessed_tokens accepted_tokens"
        self._counts = dict.fromkeys(counted.split(), 0)
        self._decode_seconds = self._prefill_seconds = 0.0
        self._finished: dict[str, int] = {}
        self._mean_seconds, self._warm_up = 1.0, warm_up
        self._start_thread()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs: it has neither failed nor been closed."""
        return self._thread.is_alive()

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence; where every token is stored, of an empty one."""
        return self.model.state_size()

    def wait(self) -> None:
        """Wait until the engine fails or is closed."""
        self._thread.join()

    def submit(self, request: Request) -> Generation:
        """Queue a request.

        Returns:
            Its stream.

        Raises:
            ValueError: If the request does not fit the model.
            QueueFullError: If too many choices are waiting.
            EngineClosedError: If the engine was closed.
        """
        held = self._check(request)
        deadline = math.inf if request.timeout is None else time.monotonic() + request.timeout
        session = request.session
        # Log-probabilities of the prompt need all of it to be read.
        cached = session is None and not (request.echo and request.logprobs is not None) and self.cache.budget > 0
        reading = _Reading(request, self.cache.keys(request.tokens[:-1]) if cached else [])
        generation = Generation(request, self._cancel)
        job = _Job(request, generation, reading, held)
        for i in range(request.n):
            job.choices.append(_Choice(job, i, None if self.codec is None else self.codec.stream_decoder()))
        with self._wake:
            if self._error is not None:
                raise EngineFailedError("the engine failed: it takes no more requests") from self._error
            if self._closing:
                raise EngineClosedError("the engine is closed: it takes no more requests")
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
                reading=sum(job.started > 0 and not job.reading.done for job in self._jobs.values()),
                running=len(self._running),
                slots=self.slots,
                cache=replace(self.cache.stats, disk_bytes=0 if disk is None else disk.size()),
                state_bytes=self._layout.bytes,
                decode_seconds=self._decode_seconds,
                prefill_seconds=self._prefill_seconds,
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

    def _check(self, request: Request) -> int:
        """Raise ValueError unless the model can answer a request; return the tokens that its session holds."""
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
        if isinstance(request.previous_state, SavedState):
            raise TypeError("previous_state must be a Session of this process, got a SavedState")
        if request.session is not None:
            request.session.check_model(self.model)
            state = request.session.state
            if state.start is not None or [*state.tensors()] != [*self._new_state().tensors()]:
                raise ValueError("previous_state does not fit this model: it is no state of it from position 0")
            held = request.session.length
        total = held + len(request.tokens) + request.max_tokens
        if self.max_length is not None and total > self.max_length:
            raise ValueError(
                f"{held + len(request.tokens)} tokens of prompt and {request.max_tokens} to generate are more than the "
                f"{self.max_length} that fit: shorten the prompt, or lower max_tokens"
            )
        return held

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
        try:
            self.model.check_length(length)
        except ValueError:
            return False
        return True

    def _rows_and_threads(self, threads: int | None) -> tuple[int, int, int]:
        """Return the number of rows of a step, and of PyTorch threads in steps and in reading prompts."""
        default = torch.get_num_threads()
        if self.device.type != "cpu":
            return self.slots, threads or default, threads or default
        # In products of other numbers of rows than multiples of four, the last ones may be summed in another order.
        rows = self.slots if self.slots == 1 else -(-self.slots // 4) * 4
        elements = rows * sum(x.numel() for x in self._new_state().tensors().values())
        if threads is None and not is_small(self.model, rows, elements):
            return rows, max(1, default - 1), default
        return rows, threads or 1, threads or 1

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
                self._start_all()
                self._step()
                self._notify()
        except BaseException as error:
            self._fail(error)

    def _prepare(self) -> None:
        """Allocate the slots, and capture what runs on a GPU."""
        torch.set_num_threads(self._threads)
        rows = self._rows
        self._loop = SlotLoop(self.model, rows, self._layout)
        self._loop.warm_up()
        self._reader = self._new_reader()
        if self._warm_up:
            with self._reading_threads():
                self._reader.warm_up()
        self._draft: DraftModel | None = None
        if isinstance(self.speculation, LanguageModel):
            self._draft = DraftModel(self.speculation, rows, self.max_length)
        self._lengths = np.zeros(rows, dtype=np.int64)  # tokens that each row holds after the steps launched so far

    def _new_reader(self) -> PromptReader:
        if self.device.type != "cuda":
            return PromptReader(self.model, self._layout, self._read_rows, self.chunk)
        most = max(self._read_rows, min(self.slots, _READ_BYTES // self._layout.bytes))
        return CapturedReader(self.model, self._layout, self._read_rows, self.chunk, most, grow=self._grow_reads)

    def _wait(self) -> bool:
        """Wait for work and take it; return False at the end."""
        with self._wake:
            while not (self._num_waiting or self._reading or self._running or self._launched or self._cancelled):
                if self._closing:
                    return False
                self._wake.wait()
            now = time.monotonic()
            # Those of jobs that have ended are removed too: with a timeout of a day there would be many.
            while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2] not in self._jobs):
                self._end_job(heapq.heappop(self._deadlines)[2], "timeout")
            for generation in self._cancelled:
                self._end_job(generation, "cancelled")
            self._cancelled.clear()
            admitted = list(self._admissible())
        for choice in admitted:
            if not choice.job.started:
                choice.job.started = time.monotonic()
                self._begin(choice.job)
        self._place()
        self._notify()
        return True

    def _admissible(self) -> Iterator[_Choice]:
        """Admit waiting choices, more than there are free slots, so that prompts are read ahead; clients take turns."""
        while self._waiting and len(self._ahead) < len(self._free) + self._most_ahead:
            client, choices = self._waiting.popitem(last=False)
            choice = choices.popleft()
            if choices:
                self._waiting[client] = choices
            self._ahead.append(choice)
            yield choice

    def _place(self) -> None:
        """Give free slots to choices whose prompts have been read; clients take turns here too."""
        ready = [choice for choice in self._ahead if choice.job.reading.done] if self._free else []
        while self._free and ready:
            choice = min(ready, key=lambda choice: self._turns.get(choice.job.request.client, -1))
            self._turns[choice.job.request.client] = next(self._number)
            ready.remove(choice)
            self._ahead.remove(choice)
            self._may_read = True
            with self._wake:
                choice.row = self._free.pop()
                self._num_waiting -= 1
            self._start(choice)
        if len(self._turns) > _MOST_TURNS:
            self._turns.clear()

    def _begin(self, job: _Job) -> None:
        """Set the state that a prompt is read from: empty, from the cache, or that of a session."""
        reading, session = job.reading, job.request.session
        if session is not None:
            reading.state = self._layout.pack(self._fit(session.state))[0]
            if not len(job.request.tokens):
                reading.logits = session.logits.to(self.device)
        elif job.request.max_tokens or job.request.echo:
            depth, reading.state = self.cache.find(reading.keys)
            reading.position = min(depth * self.chunk, len(reading.tokens))
            self.cache.count(len(reading.tokens), reading.position)
            job.generation.cached_tokens = reading.position
        else:
            reading.position = len(reading.tokens)
        if reading.state is None:
            reading.state = self._layout.empty.clone()
        if not reading.done:
            self._reading.append(job)
            self._may_read = True

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
        """Read chunks of prompts, which take turns: no more tokens than running streams may wait for."""
        left = self._reader.most_tokens * max(1, self._block_steps() // _STEPS_PER_CHUNK)
        while left > 0 and self._may_read:
            jobs = self._next_jobs()
            self._may_read = bool(jobs)
            if not jobs:
                return
            left -= self._reader.cost(len(jobs), self._shape(jobs[0]))
            if left < 0:
                return
            for job in jobs:
                self._reading.remove(job)
            behind = [job for job in jobs if not self._skip(job.reading)]
            if behind:
                self._read_chunks(behind)
            for job in jobs:
                if not job.reading.done:
                    self._reading.append(job)
                elif (whole := len(job.reading.tokens) // self.chunk) and job.reading.keys:
                    self.cache.persist(job.reading.keys[whole - 1])
            self._place()

    def _next_jobs(self) -> list[_Job]:
        """Return the first prompt of the queue, and others whose next chunk can be read with its.

        The last chunks of prompts wait until as many can be read as fit into one call, if their client has other
        prompts that have been read and wait for a slot.
        """
        found: dict[ChunkShape, list[_Job]] = {}
        served = {choice.job.request.client for choice in self._ahead if choice.job.reading.done}
        for job in self._reading:
            found.setdefault(self._shape(job), []).append(job)
        for shape, jobs in found.items():
            can_wait = all(self._left(job) <= self.chunk and job.request.client in served for job in jobs)
            if not can_wait or len(jobs) >= self._reader.rows(shape):
                return jobs[: self._reader.number(len(jobs), shape)]
        return []

    def _shape(self, job: _Job) -> ChunkShape:
        """Return the shape that the next chunk of a prompt is read in."""
        return self._reader.shape(min(self.chunk, self._left(job)))

    @staticmethod
    def _left(job: _Job) -> int:
        """Return the number of tokens of a prompt that have not been read."""
        return len(job.reading.tokens) - job.reading.position

    def _skip(self, reading: _Reading) -> bool:
        """Go on from the cache, if another prompt has been read further than this one meanwhile."""
        depth = reading.position // self.chunk
        if depth >= len(reading.keys) or not self.cache.has(reading.keys[depth]):
            return False
        depth, reading.state = self.cache.find(reading.keys)
        reading.position = min(depth * self.chunk, len(reading.tokens))
        return True

    def _read_chunks(self, jobs: list[_Job]) -> None:
        """Read a chunk of each of up to `_read_rows` prompts."""
        readings = [job.reading for job in jobs]
        pieces = [reading.tokens[reading.position : reading.position + self.chunk] for reading in readings]
        timer = _DeviceTimer(self.device)
        with self._reading_threads():
            hidden, after = self._reader.read(pieces, [x.state for x in readings if x.state is not None])
        self._reads.append(timer.end())
        self._count_reads()
        self._counts["chunks"] += len(jobs)
        self._counts["prompt_tokens"] += sum(map(len, pieces))
        for i, (job, piece) in enumerate(zip(jobs, pieces, strict=True)):
            job.reading.state = after[i]
            self._chunk_read(job, hidden[i, : len(piece)], job.reading.position + len(piece))

    @contextmanager
    def _reading_threads(self) -> Iterator[None]:
        """Use the number of PyTorch threads that prompts are read with."""
        if self._read_threads == self._threads:
            yield
            return
        torch.set_num_threads(self._read_threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def _count_reads(self) -> None:
        """Add up the time of reads that the device has done."""
        while self._reads and self._reads[0].done:
            self._prefill_seconds += self._reads.popleft().seconds

    def _chunk_read(self, job: _Job, hidden: Tensor, stop: int) -> None:
        """Take what was read of a prompt up to `stop`, with the last layer's vectors (n, dim)."""
        reading, number, start = job.reading, job.request.logprobs, job.reading.position
        reading.position = stop
        assert reading.state is not None
        if job.request.echo and number is not None:
            logs = self.model.logits(hidden[None])[0].float().log_softmax(1)
            found = _top_logs(logs, job.request.tokens[start + 1 : stop + 1].to(self.device), number)
            lists = found.lists()
            reading.logs += [lists.row(i, number) for i in range(stop - start)]
        if stop % self.chunk == 0:
            if self.state_codec.kind != "exact":
                self.state_codec.round(self._layout.view(reading.state[None]))
            if reading.keys:
                self.cache.insert(reading.keys, stop // self.chunk, reading.state, reading.own)
        elif stop // self.chunk < len(reading.keys):
            self.cache.insert(reading.keys, len(reading.keys), reading.state, [])

    def _start(self, choice: _Choice) -> None:
        """Put a choice whose prompt has been read into its slot."""
        row, request = choice.row, choice.job.request
        assert row is not None
        if request.echo:
            self._echo(choice)
        if not request.max_tokens:
            self._finish(choice, "length")
            return
        self._starting.append(choice)
        self._running[row] = choice
        choice.running = True

    def _start_all(self) -> None:
        """Write the states of choices that start to their slots."""
        started, self._starting = self._starting, []
        if not started:
            return
        rows = [choice.row for choice in started if choice.row is not None]
        before = [_history(choice.job.request) for choice in started]
        requests = [choice.job.request for choice in started]
        seeds = [choice.job.request.seed + choice.index for choice in started]
        recent = [tokens[:-1] for tokens in before]
        self._loop.sampler.put(rows, [request.sampling for request in requests], seeds, recent)
        last = [int(tokens[-1]) if len(tokens) else 0 for tokens in before]
        ready: list[tuple[int, Tensor, int]] = []
        for choice, row, tokens, token in zip(started, rows, before, last, strict=True):
            reading = choice.job.reading
            assert reading.state is not None
            self._lengths[row] = choice.job.length - 1
            if reading.logits is None:
                ready.append((row, reading.state, token))
            else:
                self._loop.put_late(row, reading.state, reading.logits)
            if self._draft is not None:
                self._draft.put(row, tokens[:-1], token)
            elif self.speculation is not None:
                ngram = BYTES_NGRAM if self.model.config.vocab_size == 256 else NGRAM
                choice.proposer = NgramProposer(tokens.tolist(), ngram)
        if ready:
            self._loop.put(*zip(*ready, strict=True))
        for choice in started:
            if all(other.running or other.finished for other in choice.job.choices):
                choice.job.reading.state = None

    def _step(self) -> None:
        """Launch decode steps of every running choice, and take the tokens of those that were launched before."""
        ahead = 0
        if self._running and (self.speculation is None or not self._speculate()):
            step_by_step = self._step_by_step
            # On a GPU the next steps run while the host takes the tokens of the last ones.
            ahead = 1 if self.device.type == "cuda" and not step_by_step else 0
            begun = time.perf_counter()
            self._launch(1 if step_by_step else self._block_steps())
            self._budget.add_step(time.perf_counter() - begun)
        while len(self._launched) > ahead:
            self._take(self._launched.popleft())

    def _speculate(self) -> bool:
        """Propose and verify draft tokens, if that has been worthwhile; return whether."""
        if not self._budget.worthwhile:
            return False
        begun = time.perf_counter()
        drafts = self._propose()
        if not any(drafts.values()):
            return False
        running = list(self._running.items())
        self._clear_full(1 + max(map(len, drafts.values())))
        tokens, logits = self._loop.verify(drafts)
        self._lengths += np.array([len(own) for own in tokens])
        if self._draft is not None:
            self._draft.follow(tokens)
        self._counts["steps"] += 1
        self._decode_seconds += time.perf_counter() - begun
        self._budget.add_round(time.perf_counter() - begun, sum(len(tokens[row]) for row, _ in running), len(running))
        for row, choice in running:
            proposed, new = len(drafts.get(row, ())), tokens[row]
            self._counts["guessed_tokens"] += proposed
            self._counts["accepted_tokens"] += len(new) - 1
            if choice.proposer is not None and proposed:
                choice.proposer.adapt(proposed, len(new) - 1)
            number, logs = choice.job.request.logprobs, []
            if number is not None:
                every = logits[row, : len(new)].float().log_softmax(1)
                lists = _top_logs(every, torch.tensor(new, device=self.device), number).lists()
                logs = [lists.row(i, number) for i in range(len(new))]
            choice.steps += len(new)
            if choice.proposer is not None:
                choice.proposer.extend(new)
            self._emit(choice, new, logs)
        return True

    def _propose(self) -> dict[int, list[int]]:
        """Return draft tokens of running choices, by row."""
        most = min(MAX_DRAFT, self._loop.sampler.draws_left - 1)
        limits = {row: min(most, choice.steps_left - 1) for row, choice in self._running.items()}
        if self._draft is not None:
            number = min(_MODEL_DRAFT, max(limits.values()))
            found = self._draft.propose(number).tolist() if number > 0 else [[]] * self._rows
            return {row: found[row][: max(0, limit)] for row, limit in limits.items()}
        pairs = [(row, choice.proposer) for row, choice in self._running.items()]
        return {row: own.propose(limits[row]) for row, own in pairs if own is not None and limits[row] > 0}

    @property
    def _step_by_step(self) -> bool:
        """Whether each token is read before the next step: a state to be stored must not advance further."""
        kept = any(choice.job.request.keep_state for choice in self._running.values())
        return kept or self.speculation is not None

    def _launch(self, steps: int) -> None:
        """Launch up to this many decode steps."""
        running = list(self._running.items())
        numbers = [choice.job.request.logprobs for _, choice in running]
        number = max((number for number in numbers if number is not None), default=None)
        steps = min(steps, max(choice.steps_left for _, choice in running))
        if self.max_length is not None:  # A row runs on after its last token, but not beyond its capacity.
            longest = max(choice.job.length + choice.steps for _, choice in running)
            steps = min(steps, self.max_length + 1 - longest)
        self._clear_full(steps)
        tokens, logs, timer = [], [], _DeviceTimer(self.device)
        for _ in range(steps):
            self._loop.step()
            tokens.append(self._loop.token.clone())
            if number is not None:
                logs.append(_top_logs(self._loop.logits.float().log_softmax(1), self._loop.token, number))
        self._lengths += steps
        self._counts["steps"] += steps
        self._launched.append(_Launched.of(running, tokens, logs, timer))
        for row, choice in running:
            choice.steps += steps
            if choice.steps_left <= 0 and not choice.job.request.keep_state:
                self._release(row)  # Its last token is known to be among these.

    def _block_steps(self) -> int:
        """Return the number of steps that are launched together."""
        if self._steps_per_sync is not None:
            return self._steps_per_sync
        seconds = max(_BLOCK_SECONDS, _BLOCK_SECONDS_PER_STREAM * len(self._running))
        return min(_BLOCK_STEPS, max(1, round(seconds / self._step_seconds)))

    def _take(self, launched: _Launched) -> None:
        """Send the tokens of launched steps."""
        columns, logs = launched.results()
        self._decode_seconds += launched.timer.seconds
        self._step_seconds += 0.2 * (launched.timer.seconds / len(launched.tokens) - self._step_seconds)
        self._count_reads()
        now = time.monotonic()
        for row, choice in launched.running:
            if choice.finished:
                continue
            if choice.proposer is not None:
                choice.proposer.extend(columns[row])
            if now < choice.due and self._can_wait(choice, columns[row]):
                choice.unsent += columns[row]
                continue
            number = choice.job.request.logprobs
            self._emit(choice, columns[row], [] if number is None else [step.row(row, number) for step in logs])

    def _can_wait(self, choice: _Choice, tokens: list[int]) -> bool:
        """Return whether tokens can be sent with later ones: not the first and last ones, nor those to check.

        An event takes a server longer than its tokens take a GPU, and the threads share one interpreter.
        """
        job, request = choice.job, choice.job.request
        if not job.generation.is_async or not choice.tokens:
            return False
        if request.stop_strings or request.keep_state or request.logprobs is not None:
            return False
        number = len(choice.tokens) + len(choice.unsent) + len(tokens)
        return number < request.max_tokens and job.stop.isdisjoint(tokens)

    def _clear_full(self, steps: int) -> None:
        """Empty rows that nothing runs in, before steps would make them longer than the model can hold."""
        if self.max_length is None:
            return
        full = [row for row in np.flatnonzero(self._lengths + steps > self.max_length) if row not in self._running]
        if full:
            self._loop.clear([int(row) for row in full])
            self._lengths[full] = 0

    def _emit(self, choice: _Choice, tokens: list[int], logs: list[tuple[float, dict[int, float]]]) -> None:
        """Send tokens of a choice, and end it at its last one."""
        job, reason = choice.job, None
        tokens, choice.unsent = [*choice.unsent, *tokens], []
        left = job.request.max_tokens - len(choice.tokens)
        if len(tokens) >= left:
            tokens, reason = tokens[:left], "length"
        new = next((i for i, token in enumerate(tokens) if token in job.stop), None) if job.stop else None
        choice.tokens += tokens if new is None else tokens[: new + 1]
        if new is None:
            new = len(tokens)
        else:
            reason = "stop"
        text, read = self._text(choice, tokens[:new])
        if choice.stopped:
            reason, new = "stop", read
        job.generation.completion_tokens += new
        self._counts["completion_tokens"] += new
        values, top = [log for log, _ in logs[:new]], [top for _, top in logs[:new]]
        delta = Delta(choice.index, tokens[:new], text, values, top)
        if reason is None:
            self._push(choice, delta)
        else:
            self._finish(choice, reason, delta)

    def _text(self, choice: _Choice, tokens: list[int]) -> tuple[str, int]:
        """Return the text that tokens make certain, and how many were needed: note whether a stop string ends it."""
        if choice.decoder is None:
            return "", len(tokens)
        stops = choice.job.request.stop_strings
        if not stops:
            return choice.decoder.extend(tokens), len(tokens)
        texts = []
        for i, token in enumerate(tokens):
            texts.append(_until_stop(choice, choice.held + choice.decoder.extend([token]), stops))
            if choice.stopped:
                return "".join(texts), i + 1
        return "".join(texts), len(tokens)

    def _echo(self, choice: _Choice) -> None:
        request, logs = choice.job.request, choice.job.reading.logs
        tokens = request.tokens.tolist()
        text = "" if self.codec is None else self.codec.decode(tokens)
        values = [] if request.logprobs is None else [None, *(log for log, _ in logs)]
        top = [] if request.logprobs is None else [{}, *(top for _, top in logs)]
        self._push(choice, Delta(choice.index, tokens, text, values, top, prompt=True))

    def _finish(self, choice: _Choice, reason: str, delta: Delta | None = None) -> None:
        """End a choice, free its slot and send its last delta."""
        delta = Delta(choice.index) if delta is None else delta
        session = None
        if choice.running and choice.job.request.keep_state and choice.tokens:
            session = self._session(choice)
        text = delta.text
        if choice.decoder is not None and not choice.stopped:
            text += choice.held + choice.decoder.flush()
        choice.finished = True
        self._push(choice, delta._replace(text=text, finish_reason=reason, session=session))
        with self._wake:
            self._finished[reason] = self._finished.get(reason, 0) + 1
            if choice.running:
                seconds = time.monotonic() - choice.job.started
                self._mean_seconds += 0.05 * (seconds - self._mean_seconds)
            if choice.row is not None and self._running.get(choice.row) is choice:
                self._release(choice.row)
            elif choice.row is not None and not choice.running:
                self._free.append(choice.row)
            if all(other.finished for other in choice.job.choices):
                self._jobs.pop(choice.job.generation, None)

    def _release(self, row: int) -> None:
        """Free the row of a choice that needs no further step."""
        with self._wake:
            del self._running[row]
            self._free.append(row)
        self._loop.sampler.release(row)

    def _session(self, choice: _Choice) -> Session:
        """Return the state after all tokens of a running choice, to be continued."""
        assert choice.row is not None
        state, _ = self._loop.take(choice.row)
        token = torch.tensor([[choice.tokens[-1]]], device=self.device)
        logits, state = self.model.extend(token, state)
        recent = torch.cat([self._loop.sampler.recent[choice.row], token[0]])
        with torch.inference_mode(False):  # Tensors that may be used outside this thread.
            return Session(state.clone(), logits[:, -1].clone(), recent[None, -64:].clone(), self.model)

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
                (self._ahead if choice in self._ahead else waiting).remove(choice)
                self._num_waiting -= 1
                self._may_read = True
            if choice.unsent:
                self._emit(choice, [], [])
            self._finish(choice, reason)
        if not waiting:
            self._waiting.pop(job.request.client, None)
        if job in self._reading:
            self._reading.remove(job)

    def _push(self, choice: _Choice, item: Delta | BaseException) -> None:
        """Add a delta to a stream; an event loop is woken for a first or last one at once, for others now and then."""
        generation, now = choice.job.generation, time.monotonic()
        waiter = generation.push(item)
        if waiter is not None:
            self._wakeups[generation] = waiter
        urgent = not isinstance(item, Delta) or item.finish_reason is not None or len(item.tokens) == len(choice.tokens)
        if urgent or now >= choice.due:
            shortest, longest = _PACE_SECONDS
            pace = min(longest, max(shortest, _PACE_SECONDS_PER_STREAM * len(self._running)))
            grid = min(pace, _WAKE_SECONDS)
            choice.due = (now // grid + round(pace / grid)) * grid
            self._due.add(generation)

    def _notify(self) -> None:
        """Wake what waits for streams that got deltas."""
        if not self._due:
            return
        found = [self._wakeups.pop(generation, None) for generation in self._due]
        self._due.clear()
        wake_all([waiter for waiter in found if waiter is not None])

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._error, self._closing = error, True
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            failure = EngineFailedError(f"the engine failed: {error}")
            failure.__cause__ = error
            self._push(job.choices[0], failure)
        self._notify()


def _check_speculation(given: object, model: LanguageModel) -> str | LanguageModel | None:
    if isinstance(given, LanguageModel):
        if not given.config.causal or given.config.vocab_size != model.config.vocab_size:
            raise ValueError("a draft model must be causal and have the tokens of the model it drafts for")
        return given
    if given is not None and not isinstance(given, str):
        raise TypeError(f'speculation must be None, "ngram" or a LanguageModel, got a {type(given).__name__}')
    return None if given is None else choose("speculation", given, ("ngram",))


def _until_stop(choice: _Choice, text: str, stops: Sequence[str]) -> str:
    """Return the part of a choice's next text that is certain; hold back what may begin a stop string."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    if found:
        choice.held, choice.stopped = "", True
        return text[: min(found)]
    longest = max(len(stop) for stop in stops) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            choice.held = text[start:]
            return text[:start]
    choice.held = ""
    return text


def _history(request: Request) -> Tensor:
    """Return the prompt, after the most recent tokens of its session."""
    if request.session is None:
        return request.tokens
    return torch.cat([x[x >= 0] for x in (request.session.recent[0].cpu(), request.tokens)])


class _TopLogs(NamedTuple):
    """Log-probabilities of tokens (n,), and of the likeliest tokens (n, number)."""

    own: Tensor
    tokens: Tensor
    values: Tensor

    def lists(self) -> _TopLists:
        return _TopLists(self.own.tolist(), self.tokens.tolist(), self.values.tolist())


class _TopLists(NamedTuple):
    """`_TopLogs` as lists."""

    own: list[float]
    tokens: list[list[int]]
    values: list[list[float]]

    def row(self, row: int, number: int) -> tuple[float, dict[int, float]]:
        """Return the log-probability of a row's token, and its `number` likeliest tokens with theirs."""
        best = zip(self.tokens[row][:number], self.values[row][:number], strict=True)
        return self.own[row], dict(best)


def _top_logs(logs: Tensor, tokens: Tensor, number: int) -> _TopLogs:
    best = logs.topk(min(number, logs.shape[1]), 1)
    return _TopLogs(logs.gather(1, tokens[:, None])[:, 0], best.indices, best.values)


@dataclass
class _Launched:
    """Decode steps that were launched: the choices in them, their tokens (steps, rows) and log-probabilities."""

    running: list[tuple[int, _Choice]]
    tokens: Tensor
    logs: list[_TopLogs]
    timer: _DeviceTimer

    @classmethod
    def of(
        cls, running: list[tuple[int, _Choice]], tokens: list[Tensor], logs: list[_TopLogs], timer: _DeviceTimer
    ) -> _Launched:
        """Begin to copy the results of steps to the host."""
        found = torch.stack(tokens).to("cpu", non_blocking=True)
        host = [_TopLogs(*(x.to("cpu", non_blocking=True) for x in step)) for step in logs]
        return cls(running, found, host, timer.end())

    def results(self) -> tuple[list[list[int]], list[_TopLists]]:
        """Wait for the steps and return the tokens of each row, and the log-probabilities of each step."""
        self.timer.wait()
        return self.tokens.T.tolist(), [step.lists() for step in self.logs]


class _DeviceTimer:
    """Time on the device, from now until `end`: by events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun = self._ended = self._mark()

    def end(self) -> _DeviceTimer:
        """End it after what has been launched."""
        self._ended = self._mark()
        return self

    def wait(self) -> None:
        """Wait for its end."""
        if isinstance(self._ended, torch.cuda.Event):
            self._ended.synchronize()

    @property
    def done(self) -> bool:
        """Whether the device has reached its end."""
        return not isinstance(self._ended, torch.cuda.Event) or self._ended.query()

    @property
    def seconds(self) -> float:
        """Its length."""
        if isinstance(self._begun, torch.cuda.Event) and isinstance(self._ended, torch.cuda.Event):
            return self._begun.elapsed_time(self._ended) / 1e3
        assert isinstance(self._begun, float)
        assert isinstance(self._ended, float)
        return self._ended - self._begun

    def _mark(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
