"""A fixed number of rows that decode together and begin and end at different times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.generation.decode import DecodeLoop, capturing, multiplications
from longspan.generation.sampling import SlotSampler
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel

REPETITION_WINDOW = 256  # the longest window of a request's repetition penalty
_WORD = 8  # bytes
_SMALLEST_READ = 32  # tokens that the end of a prompt is padded to at least on a GPU
_GROWTH, _SMALLEST_GROWN = (4, 2), 128  # times as many chunks are read where many wait, and their fewest tokens
_PADDING, _ROWS = 16, 4  # tokens of chunks on a CPU: products of other numbers of rows may be summed in another order
_SHORT_READ, _SHORT_TOKENS = 1 << 26, 512  # multiplications of a chunk, and tokens of several, that are read together
_FEW_STEPS = 4  # decode steps that take less time than reading as many tokens again after a rejected one
_PUT_ROWS = 16  # rows that are begun in one CUDA graph
_BUFFER_BYTES = 1 << 28  # the most bytes of states in the buffers of a CUDA graph

logger = logging.getLogger(__name__)


class StateLayout:
    """States of single sequences as rows of one int64 tensor, so that many are copied in few operations.

    Args:
        state: An empty state of one sequence.

    Attributes:
        size: Words of a row.
        empty: (size,), the row of the empty state.
    """

    def __init__(self, state: StackState) -> None:
        self._template = state
        self._pieces: list[tuple[int, int, torch.dtype, torch.Size]] = []  # first word, words, dtype and shape
        self._repeated: list[bool] = []
        self.size = 0
        for name, x in state.tensors().items():
            # Layers without a fold hold as many tokens as the stack does, whose length comes first.
            repeated = self.size > 0 and name.endswith(".length") and len(x) == 1
            words = -(-x.numel() * x.element_size() // (2 * _WORD)) * 2
            self._pieces.append((0 if repeated else self.size, words, x.dtype, x.shape))
            self._repeated.append(repeated)
            self.size += 0 if repeated else words
        self.empty = torch.zeros(self.size, dtype=torch.int64, device=state.length.device)
        self.write(self.empty[None], state)

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.size * _WORD

    def view(self, rows: Tensor) -> StackState:
        """Return rows (B, size) as a state of B sequences, in the same memory but for folded layers."""
        pieces = iter(self._flat(rows))

        def shaped(x: Tensor) -> Tensor:
            return next(pieces).reshape(len(rows) * x.shape[0], *x.shape[1:])

        return self._template._map(shaped)

    def write(self, rows: Tensor, state: StackState) -> None:
        """Copy a state of B sequences to rows (B, size), but for what is there already."""
        for own, x, repeated in zip(self._flat(rows), state.tensors().values(), self._repeated, strict=True):
            if not repeated and x.data_ptr() != own.data_ptr():
                own.copy_(x.reshape(len(rows), -1))

    def pack(self, state: StackState) -> Tensor:
        """Return a state of B sequences as rows (B, size)."""
        rows = self.empty.repeat(len(state.length), 1)
        self.write(rows, state)
        return rows

    def _flat(self, rows: Tensor) -> Iterator[Tensor]:
        for start, words, dtype, shape in self._pieces:
            yield rows[:, start : start + words].view(dtype)[:, : shape.numel()]


class SlotLoop(DecodeLoop):
    """A decode loop over slots. Every step runs all rows, so that its shapes never change.

    A row begins with the state before the last token of its prompt, which is the pending token: the next step writes it
    and chooses the first token, as every later step does.

    Args:
        model: A causal model in eval mode.
        slots: Number of rows.
        layout: The layout of single states.
    """

    def __init__(self, model: LanguageModel, slots: int, layout: StateLayout) -> None:
        weight, size = next(model.parameters()), model.config.vocab_size
        assert size is not None
        self.layout = layout
        self.sampler = SlotSampler(slots, size, REPETITION_WINDOW, weight.dtype, weight.device)
        logits = torch.zeros(slots, size, dtype=weight.dtype, device=weight.device)
        super().__init__(model, layout.view(layout.empty.repeat(slots, 1)), logits, self.sampler)
        self._pending = True
        self._late: list[tuple[int, Tensor, Tensor]] = []
        self._put_graph: CapturedCall | None = None
        # On a CPU, the views of one packed state are made once: making them takes longer than copying it.
        self._buffer, self._views = layout.empty.clone()[None], None  # type: tuple[Tensor, dict[str, Tensor] | None]
        if self._in_place and not self._buffer.is_cuda:
            views, memory = self._decode_tensors(self._buffer), self._buffer.untyped_storage().data_ptr()
            if all(x.untyped_storage().data_ptr() == memory for x in views.values()):
                self._views = views

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the steps that a CUDA graph is captured after, capture `put`, and empty all rows."""
        slots, layout, device = len(self.token), self.layout, self.token.device
        for _ in range(5 if device.type == "cuda" else 1):
            self.step()
        if self._graph is not None:  # Tensors of the state keep their addresses.
            rows = max(1, min(_PUT_ROWS, slots, _BUFFER_BYTES // layout.bytes))
            numbers = torch.zeros(2, rows, dtype=torch.int64, device=device)
            self._put_graph = CapturedCall(self._write, (*numbers, layout.empty.repeat(rows, 1)))
        self.clear(range(slots))

    @property
    def logits(self) -> Tensor:
        """(slots, V), the logits that the last tokens were chosen from. The next step overwrites them."""
        return self._logits

    @torch.inference_mode()
    def put(self, rows: Sequence[int], states: Sequence[Tensor], tokens: Sequence[int]) -> None:
        """Begin rows. The sampler's rows are set apart.

        Args:
            rows: The rows.
            states: (size,) of each: the packed state of one sequence, before its token.
            tokens: The pending tokens.
        """
        left = iter(zip(rows, states, tokens, strict=True))
        size = len(rows) if self._views is None else 1
        size = size if self._put_graph is None else len(self._put_graph.inputs[0])
        while items := list(islice(left, max(size, 1))):
            items += items[-1:] * (size - len(items))  # Written twice, a row is the same.
            numbers = to_device(torch.tensor([[row for row, *_ in items], [token for *_, token in items]]), self.token)
            packed = [state for _, state, _ in items]
            if self._put_graph is None:
                self._write(numbers[0], numbers[1], torch.stack(packed))
                continue
            for buffer, x in zip(self._put_graph.inputs, numbers, strict=False):
                buffer.copy_(x)
            torch.stack(packed, out=self._put_graph.inputs[2])
            self._put_graph()

    @torch.inference_mode()
    def put_late(self, row: int, state: Tensor, logits: Tensor) -> None:
        """Begin a row whose packed state holds all tokens: the next step chooses from its logits (1, V)."""
        self._late.append((row, state, logits))

    def clear(self, rows: Sequence[int]) -> None:
        """Empty rows that nothing runs in."""
        self.put(rows, [self.layout.empty] * len(rows), [0] * len(rows))

    @torch.inference_mode()
    def take(self, row: int) -> tuple[StackState, Tensor]:
        """Return copies of a row's state, without the pending token, and of its logits (1, V)."""
        return self._stack.finish_decode(self._state.select([row])), self._logits[row : row + 1].clone()

    def step(self) -> Tensor:
        """Write the pending tokens and choose the next ones; see `DecodeLoop.step`."""
        if not self._late:
            return super().step()
        graph, self._graph = self._graph, None  # It would choose before the logits are there.
        super().step()
        self._graph = graph
        return self.token

    @torch.inference_mode()
    def verify(self, drafts: Mapping[int, Sequence[int]]) -> tuple[list[list[int]], Tensor]:
        """Choose tokens of all rows as steps would, several where draft tokens are the same.

        The pending tokens and the drafts are read in one `extend`. A token is chosen at each position with the row's
        own random numbers; those up to the first one that differs from the draft are what steps would have chosen.

        Args:
            drafts: Draft tokens by row.

        Returns:
            The tokens of each row, at least one, and the logits (slots, T, V) that they were chosen from.
        """
        T = 1 + max(map(len, drafts.values()))
        tokens = torch.zeros(len(self.token), T, dtype=torch.int64)
        sizes = torch.ones(len(self.token), dtype=torch.int64)
        for row, own in drafts.items():
            tokens[row, 1 : 1 + len(own)] = torch.tensor(own, dtype=torch.int64)
            sizes[row] += len(own)
        tokens, sizes = tokens.to(self.token.device), sizes.to(self.token.device)
        tokens[:, 0] = self.token
        logits, after = self._extended(tokens, sizes)
        chosen, number = self.sampler.choose_several(logits, tokens, sizes)
        fewest, most = (int(x) for x in number.aminmax())
        if bool((number == sizes).all()):
            self.follow(tokens, number, after)
        elif fewest == most <= _FEW_STEPS:
            for i in range(most):
                self.token.copy_(tokens[:, i])
                self._advance()
        else:
            self.follow(tokens, number)
        self.token.copy_(chosen.gather(1, number[:, None] - 1)[:, 0])
        return [own[:n] for own, n in zip(chosen.tolist(), number.tolist(), strict=True)], logits

    @torch.inference_mode()
    def follow(self, tokens: Tensor, number: Tensor, after: StackState | None = None) -> None:
        """Write the first `number` (slots,) of tokens (slots, T) to the rows; after: the state, if it is known."""
        after = self._extended(tokens, number)[1] if after is None else after
        if not self._in_place:
            self._state = after
            return
        rows = self._stack.decode_state(after, next(self._model.parameters()).dtype).tensors()
        for name, x in self._state.tensors().items():
            x.copy_(rows[name])

    @torch.inference_mode()
    def restore(self, state: StackState, token: Tensor) -> None:
        """Return to copies of the loop's state and tokens."""
        if self._in_place:
            rows = state.tensors()
            for name, x in self._state.tensors().items():
                x.copy_(rows[name])
        else:
            self._state = state
        self.token.copy_(token)

    def _extended(self, tokens: Tensor, number: Tensor) -> tuple[Tensor, StackState]:
        """Return the logits and the state after the first `number` of tokens, without changing the loop's."""
        state = self._stack.finish_decode(self._state.clone())
        mask = torch.arange(tokens.shape[1], device=tokens.device) < number[:, None]
        # Without a mask, one sequence takes less time.
        return self._model.extend(tokens, state, key_mask=None if len(tokens) == 1 and bool(mask.all()) else mask)

    @torch.inference_mode()
    def _write(self, rows: Tensor, tokens: Tensor, packed: Tensor) -> None:
        """Write packed states (n, size) and pending tokens (n,) to rows (n,)."""
        self.token.index_copy_(0, rows, tokens)
        if not self._in_place:
            self._state = self._state.put(rows, self.layout.view(packed))
            return
        new = self._decode_tensors(packed)
        own = self._state.tensors()
        for name in {x.data_ptr(): name for name, x in own.items()}.values():  # Layers share one length.
            own[name].index_copy_(0, rows, new[name])

    @torch.inference_mode()
    def _decode_tensors(self, packed: Tensor) -> dict[str, Tensor]:
        """Return packed states (n, size) as tensors of the decode layout, which the next call may overwrite."""
        if len(packed) == 1 and self._views is not None:
            self._buffer.copy_(packed)
            return self._views
        return self._stack.decode_state(self.layout.view(packed), next(self._model.parameters()).dtype).tensors()

    def _sample(self) -> None:
        for row, state, logits in self._late:
            place, token = to_device(torch.tensor([[row], [0]]), self.token)
            self._write(place, token, state[None])
            self._logits[row].copy_(logits[0])
        self._late.clear()
        super()._sample()

    def _check(self) -> None:
        """Lengths are checked when a request is submitted."""


class ChunkShape(NamedTuple):
    """The shape that a chunk of a prompt is read in, which depends on nothing but its number of tokens.

    Attributes:
        size: Tokens, with padding.
        masked: Whether padding is masked.
    """

    size: int
    masked: bool


class PromptReader:
    """Reads chunks of prompts.

    On a CPU a short chunk takes as long as its many small operations, however few tokens it has. Such chunks are padded
    to a multiple of 16 tokens and read together. Their number must not change a bit: each number is first compared
    with reading them one by one, and not used again if it gave other bits. Other chunks are read alone, as they are.

    Args:
        model: A causal model in eval mode.
        layout: The layout of single states.
        rows: The most chunks that are read together.
        chunk: Tokens per chunk.

    Attributes:
        most_tokens: The most that one call costs.
    """

    def __init__(self, model: LanguageModel, layout: StateLayout, rows: int, chunk: int) -> None:
        self._model, self._layout, self._chunk, self._most = model, layout, chunk, rows
        short = min(_SHORT_READ // max(1, multiplications(model)), _SHORT_TOKENS // 2) if rows > 1 else 0
        self._short = short // _PADDING * _PADDING  # tokens up to which chunks are read together
        self.most_tokens = chunk
        self._agree: dict[tuple[int, ChunkShape], bool] = {}  # whether a number of chunks gives the bits of one

    def shape(self, tokens: int) -> ChunkShape:
        """Return the shape that a chunk of this length is read in."""
        if tokens > self._short or (tokens == self._chunk and not tokens % _ROWS):
            return ChunkShape(tokens, False)
        return ChunkShape(-(-tokens // _PADDING) * _PADDING, True)

    def rows(self, shape: ChunkShape) -> int:
        """Return the most chunks of a shape that are read together."""
        if shape.size > self._short:
            return 1
        return _power_of_two(min(self._most, _SHORT_TOKENS // shape.size))

    def number(self, chunks: int, shape: ChunkShape) -> int:
        """Return how many of several chunks of a shape to read together: few numbers, which are compared first."""
        return _power_of_two(min(chunks, self.rows(shape)))

    def cost(self, chunks: int, shape: ChunkShape) -> int:
        """Return how many tokens take as long as a call with chunks of a shape: short ones take that of a whole one."""
        return self._chunk if shape.size <= self._short else shape.size

    def warm_up(self) -> None:
        """Compare every number of chunks that may be read together with reading them one by one."""
        rng, longest = torch.Generator().manual_seed(0), min(self._short, self._chunk)
        # A whole chunk may be read without a mask.
        lengths = [*range(_PADDING, longest, _PADDING), longest - 1, longest] if longest else []
        for shape, length in {self.shape(length): length for length in lengths if length}.items():
            number = self.rows(shape)
            while number > 1:
                tokens = torch.randint(int(self._model.config.vocab_size or 1), (number, length), generator=rng)
                self.read([*tokens], [self._layout.empty.clone() for _ in range(number)])
                number //= 2

    @torch.inference_mode()
    def read(self, tokens: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Extend packed states (size,) by tokens of one shape; the states may be overwritten.

        Returns:
            The last layer's vectors (rows, size, dim), and the packed states (rows, size of a row).
        """
        shape = self.shape(len(tokens[0]))
        if len(tokens) == 1:
            return self._read(*_pad(tokens, 1, shape), states[0][None])
        key = len(tokens), shape
        if not self._agree.get(key, True):
            return self._read_alone(tokens, states, shape)
        hidden, after = self._read(*_pad(tokens, len(tokens), shape), torch.stack([*states]))
        if key not in self._agree:
            expected = self._read_alone(tokens, states, shape)
            self._agree[key] = torch.equal(expected[1], after) and all(
                torch.equal(expected[0][i, : len(own)], hidden[i, : len(own)]) for i, own in enumerate(tokens)
            )
            return expected
        return hidden, after

    def _read_alone(
        self, tokens: Sequence[Tensor], states: Sequence[Tensor], shape: ChunkShape
    ) -> tuple[Tensor, Tensor]:
        found = [self._read(*_pad([own], 1, shape), state[None]) for own, state in zip(tokens, states, strict=True)]
        return torch.cat([hidden for hidden, _ in found]), torch.cat([after for _, after in found])

    def _read(self, tokens: Tensor, sizes: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor]:
        mask = None
        if sizes is not None:
            mask = torch.arange(tokens.shape[1], device=tokens.device) < sizes[:, None]
        state = self._layout.view(packed)._map(Tensor.contiguous)
        hidden, after = self._model.extend_hidden(tokens, state, key_mask=mask)
        self._layout.write(packed, after)
        return hidden, packed


class CapturedReader(PromptReader):
    """Reads chunks of prompts on a GPU, padded to one of few sizes, each with its own number of rows and CUDA graph.

    A call takes long for its many small operations, however few tokens it has. Where many prompts wait, four times as
    many chunks are read in little more than twice the time. Their number must not change a bit: the two are compared
    first. If they differ, the same is tried with twice as many, which are always read together if that differs too.

    Args:
        model: A causal model in eval mode.
        layout: The layout of single states.
        rows: Number of whole chunks that are read together.
        chunk: Tokens per chunk.
        most: The most chunks of any size that are read together.
        grow: Whether more are read where many wait.
    """

    def __init__(
        self, model: LanguageModel, layout: StateLayout, rows: int, chunk: int, most: int, *, grow: bool = True
    ) -> None:
        super().__init__(model, layout, 1, chunk)
        self._graphs: dict[int, list[CapturedCall]] = {}  # by size, the one with the fewest rows first
        size, tokens = chunk, rows * chunk
        while size == chunk or size >= _SMALLEST_READ:
            number = min(most, tokens // size)
            self._graphs[size] = [self._capture(number, size)]
            if grow and size >= _SMALLEST_GROWN and _GROWTH[0] * number <= most:
                self._grow(size, number)
            size //= 2
        self.most_tokens = max(calls[-1].inputs[0].numel() for calls in self._graphs.values())

    def shape(self, tokens: int) -> ChunkShape:
        return ChunkShape(min(size for size in self._graphs if size >= tokens), True)

    def rows(self, shape: ChunkShape) -> int:
        return len(self._graphs[shape.size][-1].inputs[0])

    def number(self, chunks: int, shape: ChunkShape) -> int:
        return min(chunks, self.rows(shape))

    def cost(self, chunks: int, shape: ChunkShape) -> int:
        large = self._call(chunks, shape).inputs[0].numel() > self.most_tokens // 2
        return self.most_tokens if large else self.most_tokens // 2

    @torch.inference_mode()
    def read(self, tokens: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        shape = self.shape(len(tokens[0]))
        graph = self._call(len(tokens), shape)
        rows = len(graph.inputs[0])
        for buffer, x in zip(graph.inputs, _pad(tokens, rows, shape), strict=False):
            assert x is not None
            buffer.copy_(x.pin_memory(), non_blocking=True)
        torch.stack([*states, *[self._layout.empty] * (rows - len(states))], out=graph.inputs[2])
        hidden, after = graph()
        return hidden, after.clone()

    def _grow(self, size: int, number: int) -> None:
        """Add a call that reads more chunks of a size, or replace the one there is."""
        calls = self._graphs[size]
        for factor in _GROWTH:
            grown = self._capture(factor * number, size)
            if self._same(calls[0], grown):
                calls.append(grown)
                return
        logger.info(
            "chunks of up to %d tokens are always read %d together: other numbers give other bits",
            size,
            factor * number,
        )
        self._graphs[size] = [grown]

    def _call(self, chunks: int, shape: ChunkShape) -> CapturedCall:
        """Return the call with the fewest rows that takes this many chunks."""
        return next(call for call in self._graphs[shape.size] if len(call.inputs[0]) >= chunks)

    def _capture(self, rows: int, size: int) -> CapturedCall:
        logger.info("preparing to read %d chunks of up to %d tokens", rows, size)
        numbers = torch.zeros(rows, size, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        device = self._layout.empty.device
        return CapturedCall(self._read, (*(x.to(device) for x in numbers), self._layout.empty.repeat(rows, 1)))

    @torch.inference_mode()
    def _same(self, few: CapturedCall, many: CapturedCall) -> bool:
        """Return whether two calls give chunks the same bits, twice in a row: from empty states, then from others."""
        (rows, size), (total, _) = few.inputs[0].shape, many.inputs[0].shape
        rng = torch.Generator().manual_seed(0)
        vocabulary = int(self._model.config.vocab_size or 1)
        packed = self._layout.empty.repeat(total, 1)
        for _ in range(2):
            given = (
                torch.randint(vocabulary, (total, size), generator=rng),
                torch.randint(1, size + 1, (total,), generator=rng),
                packed,
            )
            many_hidden, many_after = (x.clone() for x in _filled(many, given)())
            for start in range(0, total, rows):
                part = slice(start, start + rows)
                hidden, after = _filled(few, [x[part] for x in given])()
                mask = torch.arange(size) < given[1][part, None]
                if not torch.equal(after, many_after[part]) or not torch.equal(hidden[mask], many_hidden[part][mask]):
                    return False
            packed = many_after
        return True


def _filled(call: CapturedCall, inputs: Sequence[Tensor]) -> CapturedCall:
    """Return a call with these inputs."""
    for buffer, x in zip(call.inputs, inputs, strict=True):
        buffer.copy_(x)
    return call


def _pad(tokens: Sequence[Tensor], rows: int, shape: ChunkShape) -> tuple[Tensor, Tensor | None]:
    """Return chunks as rows (rows, size), and their numbers of tokens (rows,) if these are masked."""
    if not shape.masked:
        return torch.stack([*tokens]), None
    padded, sizes = torch.zeros(rows, shape.size, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    for i, own in enumerate(tokens):
        padded[i, : len(own)], sizes[i] = own, len(own)
    return padded, sizes


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


class CapturedCall:
    """A function of tensors with fixed addresses on a GPU, as a replayed CUDA graph where it can be captured.

    What waits for the device cannot be captured, and is called.

    Args:
        function: What to call.
        inputs: Its arguments; fill them before each call.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...] | None], inputs: tuple[Tensor, ...]) -> None:
        self.inputs, self._function = inputs, function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] | None = None
        for _ in range(2):  # Kernels are compiled and libraries loaded.
            function(*inputs)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with capturing(graph):
                self._outputs = function(*inputs)
            self._graph = graph
        except RuntimeError as error:
            logger.warning("a step of the engine cannot be captured in a CUDA graph: %s", error)
            torch.cuda.synchronize()

    def __call__(self) -> tuple[Tensor, ...]:
        """Run the function; the next call overwrites what is returned."""
        if self._graph is None:
            return self._function(*self.inputs) or ()
        self._graph.replay()
        return self._outputs or ()


def to_device(x: Tensor, like: Tensor) -> Tensor:
    """Copy a tensor of the host to the device of another one, without waiting for it."""
    return x.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else x
