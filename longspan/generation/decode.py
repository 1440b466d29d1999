"""One token after the other: a choice from logits, a step of the model, in memory that stays where it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from longspan.generation.session import Session
from longspan.mechanisms.linformer import Projection
from longspan.models.layers import Attention
from longspan.models.residual import ResidualBranch, StackState
from longspan.models.transformer import LanguageModel
from longspan.ops.common import dispatch
from longspan.ops.decode import why_not_triton
from longspan.protocol import Mechanism, State

# Multiplications and numbers held: where a step has fewer, threads on a CPU wait for each other longer than they help.
_SMALL = 1 << 23
_WARM = 3  # steps before one is captured: kernels are compiled and libraries loaded by then


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    temperature: 0 takes the likeliest. top_k: only the k likeliest. top_p: the likeliest that together reach p.
    min_p: those at least min_p times as likely as the likeliest. repetition_penalty: logits of the row's last
    repetition_window tokens are divided by it if positive, multiplied if negative.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        if self.repetition_penalty <= 0 or self.repetition_window < 1:
            raise ValueError(
                "repetition_penalty must be positive (1 is none) and repetition_window at least 1, got "
                f"{self.repetition_penalty} and {self.repetition_window}"
            )

    def probabilities(self, logits: Tensor, recent: Tensor) -> Tensor:
        """logits (B, V), recent (B, window) tokens, −1 where none -> (B, V) that sum to one."""
        logits = self.penalized(logits.to(torch.promote_types(logits.dtype, torch.float32)), recent)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1)
        logits = logits if self.temperature == 1 else logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k, 1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(1)
        if self.min_p is None and self.top_p is None:
            return probabilities
        if self.min_p is not None:
            probabilities = probabilities * (probabilities >= self.min_p * probabilities.amax(1, keepdim=True))
        if self.top_p is not None:
            ordered, order = probabilities.sort(1, descending=True)
            # A token stays if those likelier than it do not reach p; the likeliest always does.
            before = ordered.cumsum(1) - ordered
            kept = torch.zeros_like(probabilities).scatter(1, order, ordered * (before < self.top_p))
            probabilities = kept
        return probabilities / probabilities.sum(1, keepdim=True)

    def penalized(self, logits: Tensor, recent: Tensor) -> Tensor:
        """Logits (B, V) after the repetition penalty for the tokens in recent, −1 where none."""
        if self.repetition_penalty == 1:
            return logits
        seen = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
        seen = seen.scatter(1, recent.masked_fill(recent < 0, logits.shape[1]), True)[:, :-1]
        weaker = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, weaker, logits)


class DecodeLoop:
    """Everything a step reads and writes, at fixed addresses, so that a CUDA graph can hold it.

    A step takes the token chosen last, if any, into the state, and chooses the next.
    """

    def __init__(self, model: LanguageModel, memory: Session, sampling: Sampling, stop: Sequence[int]) -> None:
        self._model, self._sampling = model, sampling
        device, rows = memory.logits.device, len(memory.logits)
        stack = model.transformer.stack
        # What `decode_step` does not do goes on by `extend`, which autocast reaches too.
        self._stepping = stack.supports_decode and not torch.is_autocast_enabled(device.type)
        self._capturing = self._stepping and device.type == "cuda"
        self._small = _is_small(model, memory.state)
        with self.alone():
            self._state: StackState = memory.state.clone()
            if self._stepping:
                dtype = next(model.parameters()).dtype
                self._state = self._through(
                    stack.share_length(self._state), lambda own, held: own.decode_state(held, dtype)
                )
        self._logits, self._recent = memory.logits.clone(), memory.recent.clone()
        self._stop = torch.tensor(list(stop), dtype=torch.int64, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(rows, 0, dtype=torch.float64, device=device)
        self._index = torch.zeros(rows, dtype=torch.int64, device=device)  # of the drawn number that is next
        self._answer = torch.zeros(2, rows, dtype=torch.float64, device=device)
        self._fused = (
            why_not_triton(self._logits) is None and memory.logits.shape[1] <= dispatch.step_kernels().LARGEST_CHOICE
        )
        self._pending, self._steps = False, 0  # whether a token is chosen that the state does not hold yet
        self._graph: torch.cuda.CUDAGraph | None = None
        self._mechanisms = [
            (place, branch.layer.mechanism)
            for place, branch in enumerate(stack.branches)
            if isinstance(branch, ResidualBranch) and isinstance(branch.layer, Attention)
        ]
        self._limits = _limits(model)
        self._longest = int(memory.state.length.max()) if self._limits else 0

    def fill(self, blocks: list[Tensor]) -> None:
        """New uniform numbers (block,) for each row."""
        drawn = torch.stack(blocks)
        if self._drawn.shape == drawn.shape:
            self._drawn.copy_(drawn)
        else:
            self._drawn = drawn.to(self._drawn.device)
        self._index.zero_()
        if self._steps:
            self._small = _is_small(self._model, self._state)  # a memory may have grown

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One thread within, where steps are small; then as many as there were.

        A thread that meets PyTorch for the first time keeps the number it finds: only where there are no others.
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
        """(2, B) float64: the next tokens, −1 for rows that have ended, and their log-probabilities."""
        self._check()
        if self._graph is not None and self._pending:
            self._graph.replay()
            self._steps += 1
            return self._answer.clone()
        trying = self._capturing and self._pending and self._steps >= _WARM
        before = self._addresses() if trying else {}
        if self._pending:
            self._advance()
        self._choose(self._pending)
        self._pending, self._steps = True, self._steps + 1
        answer = self._answer.clone()
        if trying:
            # A memory that grows moves, and cannot be held.
            self._capturing = False
            if before == self._addresses():
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._advance()
                    self._choose(True)
        return answer

    def memory(self) -> Session:
        """A copy of all that was read and said so far."""
        with self.alone():
            if self._pending:
                with torch.inference_mode():
                    self._advance()
                    self._join()
                self._pending = False
            state = self._through(self._state.clone(), lambda own, held: own.finish_decode(held))
            return Session(state, self._logits.clone(), self._recent.clone())

    def _advance(self) -> None:
        if self._stepping:
            logits, self._state = self._model.decode_step(self._token, self._state)
        else:
            out, self._state = self._model.extend(self._token[:, None], self._state)
            logits = out[:, -1]
        self._logits.copy_(logits)

    def _join(self) -> None:
        """The token chosen last becomes one of the recent ones."""
        self._recent.copy_(torch.cat([self._recent[:, 1:], self._token[:, None]], 1))

    def _choose(self, joins: bool) -> None:
        """The next token; joins: after the last one has become one of the recent."""
        if self._fused:
            own = self._recent, self._token, self._drawn, self._index, self._stop, self._ended, self._answer
            dispatch.step_kernels().choose(self._logits, *own, joins=joins, how=self._sampling)
            return
        if joins:
            self._join()
        token = self._likeliest() if self._sampling.temperature == 0 else self._drawn_token()
        if len(self._stop):
            self._ended.logical_or_(torch.isin(token, self._stop))
            self._answer[0].copy_(token.masked_fill(self._ended, -1))
        else:
            self._answer[0].copy_(token)
        self._token.copy_(token)

    def _likeliest(self) -> Tensor:
        """(B,) the only token there is to choose, with certainty."""
        logits = self._logits
        if self._sampling.repetition_penalty != 1:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self._sampling.penalized(logits, self._recent).argmax(1)

    def _drawn_token(self) -> Tensor:
        """(B,) by the next random number, its log-probability in the answer."""
        probabilities = self._sampling.probabilities(self._logits, self._recent)
        token = _pick(probabilities, self._drawn.gather(1, self._index[:, None])[:, 0])
        self._answer[1].copy_(probabilities.gather(1, token[:, None]).log()[:, 0])
        self._index.add_(1)
        return token

    def _check(self) -> None:
        """At any step: a state of other random features than the model has now is refused, and the end of a table."""
        for check in self._limits:
            check(self._longest + self._steps)
        if self._stepping:
            for place, mechanism in self._mechanisms:
                mechanism._check_state(self._state.branches[place].inner[0], self._logits, None)

    def _through(self, state: StackState, change: Callable[[Mechanism, State], State]) -> StackState:
        """The state with that of every mechanism changed, but for a context's."""
        branches = []
        for branch, held in zip(self._model.transformer.stack.branches, state.branches, strict=True):
            if isinstance(branch, ResidualBranch) and isinstance(branch.layer, Attention) and not branch.layer.cross:
                held = replace(held, inner=tuple(change(branch.layer.mechanism, inner) for inner in held.inner))
            branches.append(held)
        return replace(state, branches=tuple(branches))

    def _addresses(self) -> dict[str, int]:
        return {name: x.data_ptr() for name, x in self._state.tensors().items()}


def _is_small(model: LanguageModel, state: StackState) -> bool:
    products = sum(x.weight.numel() for x in model.modules() if isinstance(x, nn.Linear))
    held = sum(x.numel() for x in state.tensors().values())
    return state.length.device.type == "cpu" and len(state.length) * products + held <= _SMALL


def _limits(model: LanguageModel) -> list[Callable[[int], None]]:
    """What refuses a number of tokens: tables of positions, and projections over a fixed length."""
    found: list[Callable[[int], None]] = []
    if model.positions is not None and model.positions.reach is not None:
        found.append(model.positions.check)
    for branch in model.transformer.stack.branches:
        if isinstance(branch, ResidualBranch) and isinstance(branch.layer, Attention) and not branch.layer.cross:
            tables = [module for module in branch.layer.mechanism.modules() if isinstance(module, Projection)]
            # Along every stride-th token a table reaches as much further.
            found += [table.check_length for table in tables if not table.periodic and branch.stride == 1]
    return found


def _pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """(B,) the token at which the cumulative probability passes a uniform number of (B,)."""
    cumulative = probabilities.double().cumsum(1)
    total = cumulative[:, -1:]
    # A number that rounds up to the total would fall past the last token that can be had.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
