"""The decode loop: one token after another, from a state of constant size."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longspan.generation.sampling import Sampler
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.protocol import Mechanism

# Multiplications plus state elements of a step. Below this, threads on a CPU cost more than they save.
_SMALL = 1 << 23
_RECOUNT = 1024  # steps until the elements of a state, which may grow, are counted again
_WARMUP = 3  # steps before a CUDA graph is captured: kernels are compiled and libraries loaded by then


@dataclass
class _Snapshot:
    """A point that `DecodeLoop.rollback` can return to, and the tokens chosen since."""

    state: StackState
    logits: Tensor
    token: Tensor
    pending: bool
    steps: int
    sampler: Any
    tokens: list[Tensor] = field(default_factory=list)


class DecodeLoop:
    """Decodes one token at a time for a fixed number of sequences.

    Every tensor that a step reads or writes keeps its address, so that on a GPU a step is one replayed CUDA graph. A
    step writes the pending token, chosen by the step before, to the state and chooses the next one.

    The state is converted to the mechanisms' decode layout (`Mechanism.decode_state`) on entry and back
    (`Mechanism.finish_decode`) by `state_and_logits`; nothing else sees the decode layout.

    Args:
        model: A causal model in eval mode.
        state: The state after the prompt; copied.
        logits: (B, V), the logits after the prompt; copied.
        sampler: Chooses the tokens.

    Attributes:
        token: (B,) int64, the tokens chosen last. The next step overwrites it.
    """

    def __init__(self, model: LanguageModel, state: StackState, logits: Tensor, sampler: Sampler) -> None:
        self._model, self._sampler = model, sampler
        device, stack = logits.device, model.transformer.stack
        # `extend` covers what `decode_step` does not: axial folding, states that start later, autocast.
        self._in_place = stack.supports_decode and state.start is None and not torch.is_autocast_enabled(device.type)
        self._capturing = self._in_place and device.type == "cuda"
        self._small = _is_small(model, state)
        # Views of inference tensors, of which a step makes many, record nothing for autograd.
        with self.single_thread(), torch.inference_mode():
            self._state: StackState = state.clone()
            if self._in_place:
                self._state = stack.decode_state(self._state, next(model.parameters()).dtype)
            self._function = model.decode_function(self._state) if self._in_place and device.type == "cpu" else None
        self._logits = logits.clone()
        self.token = torch.zeros(len(logits), dtype=torch.int64, device=device)
        self._pending, self._steps = False, 0  # pending: `token` is not in the state yet
        self._graph: torch.cuda.CUDAGraph | None = None
        self._snapshot: _Snapshot | None = None
        self._stack, self._layers, self._prompt_length = stack, stack.attention_layers(), int(state.end.max())
        mechanisms = [module for module in stack.modules() if isinstance(module, Mechanism)]
        self._drawn = [mechanism for mechanism in mechanisms if type(mechanism).draw is not Mechanism.draw]
        self._draws: list[int | None] | None = None  # with which the states were checked last

    @contextmanager
    def single_thread(self) -> Iterator[None]:
        """Run with one PyTorch thread where steps are small, then restore the number of threads.

        A new Python thread inherits the number that it finds, so this does nothing in a process with several.
        """
        threads = torch.get_num_threads()
        if not self._small or threads == 1 or threading.active_count() > 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def step(self) -> Tensor:
        """Write the pending token to the state and choose the next one.

        Returns:
            (B,) int64, `self.token`. The next step overwrites it.
        """
        self._check()
        self._sampler.prepare()
        if self._graph is not None and self._pending:
            self._graph.replay()
            if not self._sampler.capturable:
                self._sample()
        else:
            capture = self._capturing and self._pending and self._steps >= _WARMUP
            before = self._addresses() if capture else {}
            if self._pending:
                self._advance()
            self._sample()
            if capture:
                self._capture(before)
        self._pending, self._steps = True, self._steps + 1
        if self._steps % _RECOUNT == 0:
            self._small = _is_small(self._model, self._state)
        if self._snapshot is not None:
            self._snapshot.tokens.append(self.token.clone())
        return self.token

    def state_and_logits(self) -> tuple[StackState, Tensor]:
        """Return copies of the state and the logits after every token chosen so far. The loop can go on."""
        with self.single_thread():
            if self._pending:
                self._advance()
                self._sampler.append(self.token)
                self._pending = False
            return self._stack.finish_decode(self._state.clone()), self._logits.clone()

    def snapshot(self) -> None:
        """Remember this point for `rollback`, at the cost of one copy of the state. Replaces the last snapshot."""
        self._snapshot = _Snapshot(
            self._state.clone(),
            self._logits.clone(),
            self.token.clone(),
            self._pending,
            self._steps,
            self._sampler.snapshot(),
        )

    def rollback(self, number: int) -> None:
        """Drop the last `number` tokens, as if they had never been chosen.

        A single token that is still pending is dropped for free. Otherwise the state of the last `snapshot` is restored
        and the tokens between it and the dropped ones are decoded again.

        Args:
            number: How many tokens to drop, at most as many as were chosen since the last `snapshot`.

        Raises:
            ValueError: If fewer tokens were chosen since the last `snapshot`, or there is none.
        """
        saved = self._snapshot
        available = 0 if saved is None else len(saved.tokens)
        if not 0 <= number <= available:
            raise ValueError(
                f"rollback can drop 0 to {available} tokens, those chosen since the last snapshot, got {number}: "
                "call snapshot() before the tokens that may be dropped"
            )
        if saved is None or number == 0:
            return
        del saved.tokens[available - number :]
        only_pending = number == 1 and self._pending
        self._sampler.restore(saved.sampler)
        if not only_pending:
            self._restore(saved)
        token, pending = saved.token, saved.pending
        for chosen in saved.tokens:
            self._sampler.prepare()
            if pending:
                self._sampler.append(token)
                if not only_pending:
                    self._advance()
            self._sampler.skip(chosen)
            self.token.copy_(chosen)
            token, pending = chosen, True
        if only_pending and pending:
            self._sampler.append(token)  # it is in the state already
        self._pending, self._steps = pending and not only_pending, saved.steps + len(saved.tokens)

    @torch.inference_mode()
    def _restore(self, saved: _Snapshot) -> None:
        """Copy a snapshot into the loop's tensors, which keep their addresses unless the state has grown."""
        old, new = self._state.tensors(), saved.state.tensors()
        if all(x.shape == new[name].shape for name, x in old.items()):
            for name, x in old.items():
                x.copy_(new[name])
        else:
            clone = saved.state.clone()
            self._state = self._stack.share_length(clone) if self._in_place else clone
            self._function = None if self._function is None else self._model.decode_function(self._state)
        self._logits.copy_(saved.logits)
        self.token.copy_(saved.token)

    @torch.inference_mode()
    def _advance(self) -> None:
        """Write the token to the state and compute the logits after it."""
        if self._function is not None:
            logits = self._function(self.token)
        elif self._in_place:
            logits, self._state = self._model.decode_step(self.token, self._state)
        else:
            out, self._state = self._model.extend(self.token[:, None], self._state)
            logits = out[:, -1]
        self._logits.copy_(logits)

    def _sample(self) -> None:
        self._sampler.sample(self._logits, self.token, append=self._pending)

    def _capture(self, before: dict[str, int]) -> None:
        """Capture a step in a CUDA graph, unless the state is one that grows and so changes its address."""
        self._capturing = False
        if before != self._addresses():
            return
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            self._advance()
            if self._sampler.capturable:
                self._sample()

    def _check(self) -> None:
        """Raise ValueError at the end of a table of positions, or if the model's random features were redrawn."""
        length = self._prompt_length + self._steps
        if self._model.positions is not None:
            self._model.positions.check(length)
        draws = [mechanism.draw for mechanism in self._drawn]
        if draws != self._draws:
            self._check_states()
            self._draws = draws
        for i, layer in self._layers:
            branch = self._state.branches[i]
            if not branch.cross and branch.stride == 1:  # with a stride a table covers as many times the tokens
                layer.mechanism.check_length(length)

    def _check_states(self) -> None:
        for i, layer in self._layers:
            branch = self._state.branches[i]
            layer.mechanism.check_state(layer.mechanism_state(branch.inner[0]), len(self.token) * branch.stride)

    def _addresses(self) -> dict[str, int]:
        return {name: x.data_ptr() for name, x in self._state.tensors().items()}


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture a CUDA graph, whatever other threads do on the device meanwhile.

    The garbage collector waits: a graph that it destroyed here would end the capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, then restore the mode of every layer."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def is_small(model: LanguageModel, batch_size: int, elements: int) -> bool:
    """Return whether a step on a CPU, with states of `elements` numbers in all, is faster in one thread."""
    return batch_size * multiplications(model) + elements <= _SMALL


def multiplications(model: LanguageModel) -> int:
    """Return the number of multiplications in the linear layers for one token."""
    weights = [getattr(x, "weight", None) for x in model.modules()]
    matrices = [x for x in weights if isinstance(x, Tensor) and x.dtype == torch.int8]
    matrices += [x.weight for x in model.modules() if isinstance(x, nn.Linear)]
    return sum(x.numel() for x in matrices)


def _is_small(model: LanguageModel, state: StackState) -> bool:
    elements = sum(x.numel() for x in state.tensors().values())
    return state.length.device.type == "cpu" and is_small(model, len(state.length), elements)
