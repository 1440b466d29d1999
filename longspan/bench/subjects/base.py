"""The interface of a benchmark subject, and how it is measured: accuracy, then peak memory, then times."""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from longspan.bench.memory import PeakMemory, limit_memory, release_freed
from longspan.bench.timing import cuda_graph, kernel_ms, sample_ms

Status = Literal[
    "ok", "out of memory", "timed out", "crashed", "error", "wrong", "not installed", "not supported", "skipped"
]
_SHORT = 512


@dataclass(frozen=True)
class Case:
    """Sizes, dtype and device of one benchmark. `depth` is the number of layers of a model."""

    length: int
    batch_size: int = 1
    num_heads: int = 8
    head_dim: int = 64
    causal: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    depth: int = 1

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class MeasurementConfig:
    """How thoroughly to measure.

    Attributes:
        rounds: Processes per subject. Subjects are interleaved, so that a drift of the machine affects all of them.
        repeats: Samples per process and step.
        seconds: Time budget of a step's samples; at least one is taken.
        timeout: Seconds after which a process is killed.
        threads: CPU threads.
        memory_limit: GB that a process may allocate beyond its libraries; None for no limit.
        profile: Record the time of each CUDA kernel of longspan's subjects.
        longest_graph: Milliseconds of the longest step that is also timed from a CUDA graph; longer ones do not depend
            on the host.
        check: Check the accuracy first.
        warm_up: Seconds for which a step is called on CUDA before it is timed.
        clock: "wall" or "processor", the time of a step on the CPU.
    """

    rounds: int = 3
    repeats: int = 5
    seconds: float = 10.0
    timeout: float = 900.0
    threads: int = 1
    memory_limit: float | None = None
    profile: bool = True
    longest_graph: float = math.inf
    check: bool = True
    warm_up: float = 0.2
    clock: str = "wall"


class TimedStep(NamedTuple):
    """A call to time, which returns its outputs.

    Attributes:
        call: The step.
        gradients: Run with autograd enabled.
        tokens: Tokens processed by a call, to report tokens/s.
        bytes: Smallest possible memory traffic of a call, to report TB/s.
        graph: On CUDA, also time the step replayed from a CUDA graph.
    """

    call: Callable[[], Sequence[Tensor]]
    gradients: bool = False
    tokens: int | None = None
    bytes: int | None = None
    graph: bool = False

    def run(self) -> Sequence[Tensor]:
        """Call the step with autograd enabled or disabled."""
        with torch.set_grad_enabled(self.gradients):
            return self.call()


class Workload(NamedTuple):
    """The steps of a subject by name, the one with the highest peak memory last, and metrics that need no timing."""

    steps: Mapping[str, TimedStep]
    metrics: Mapping[str, Any] = {}

    @property
    def heaviest(self) -> TimedStep:
        return list(self.steps.values())[-1]


class AccuracyCheck(NamedTuple):
    """The largest error, relative to the largest reference value, and the largest error allowed.

    Attributes:
        error: The worst of all results.
        tolerance: What is allowed.
        reference: What the results are compared with.
        result: Which result is the worst; empty if only the output is compared.
    """

    error: float
    tolerance: float
    reference: str
    result: str = ""

    @property
    def failure(self) -> str | None:
        """How the check fails; None if it does not."""
        if self.error <= self.tolerance:
            return None
        of = f" of {self.result}" if self.result else ""
        return f"error {self.error:.1e}{of} against {self.reference}, allowed {self.tolerance:.0e}"


@dataclass
class Measurement:
    """The result of one process.

    Attributes:
        status: "ok", or why there are no times.
        message: Details of a status other than "ok".
        times: Samples of each step in milliseconds.
        tokens: Tokens per call, for steps that count them.
        bytes: Smallest possible memory traffic per call, for steps that count it.
        peak_mb: Peak memory.
        memory: How the peak was measured.
        check: The accuracy check.
        metrics: Other metrics, such as the number of parameters or bits per byte.
        kernels: [milliseconds, launches] of each CUDA kernel of the heaviest step.
    """

    status: Status
    message: str = ""
    times: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    peak_mb: float | None = None
    memory: str = ""
    check: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject(ABC):
    """Something to benchmark. It is pickled to the process that measures it and holds only names and numbers."""

    name: str

    @property
    def package(self) -> str:
        """The distribution that provides it."""
        return "longspan"

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        """Return why this case cannot be measured, if that is known without running it."""
        return None

    @abstractmethod
    def workload(self, case: Case) -> Workload:
        """Return the steps to time, with all inputs allocated."""

    def check(self, case: Case) -> AccuracyCheck | None:
        """Compare the outputs with a reference at a small size; None if there is no reference."""
        return None

    def measure(self, case: Case, config: MeasurementConfig, wait: Callable[[], None] = lambda: None) -> Measurement:
        """Check the accuracy, then measure peak memory and times. A subject that fails the check is not timed.

        Args:
            case: Sizes, dtype and device.
            config: Number of samples and limits.
            wait: Called once, after compilation and before the first timed call.

        Returns:
            The measurement; its status is "wrong" if the check fails or an output is not finite.
        """
        if config.memory_limit is not None:
            limit_memory(config.memory_limit, case.device)
        torch.manual_seed(0)
        check = self.check(case) if config.check else None
        checked = None if check is None else check._asdict()
        if check is not None and check.failure is not None:
            return Measurement("wrong", check.failure, check=checked)
        if case.device == "cpu":
            # Lazily loaded code and threads are not part of a subject's memory.
            self.workload(replace(case, length=min(case.length, _SHORT))).heaviest.run()
        work = self.workload(case)
        if case.device == "cuda":
            for _ in range(3):  # compilation and CUDA graphs of torch.compile
                work.heaviest.run()
        gc.collect()
        release_freed()

        peak = PeakMemory(case.device)
        outputs = work.heaviest.run()
        result = Measurement("ok", peak_mb=peak.stop(), memory=peak.method, check=checked, metrics=dict(work.metrics))
        if not all(bool(x.isfinite().all()) for x in outputs):
            return Measurement("wrong", "outputs or gradients are not finite", check=checked)
        del outputs
        release_freed()
        wait()
        for name, step in work.steps.items():
            result.times[name] = sample_ms(
                step.run, case.device, config.repeats, config.seconds, config.warm_up, config.clock
            )
            if step.tokens is not None:
                result.tokens[name] = step.tokens
            if step.bytes is not None:
                result.bytes[name] = step.bytes
        if case.device == "cuda":
            _measure_kernels(work, config, result, profile=config.profile and self.package == "longspan")
        return result


def _measure_kernels(work: Workload, config: MeasurementConfig, result: Measurement, profile: bool) -> None:
    """Add the times of CUDA graphs and of single kernels."""
    if profile:
        result.kernels = kernel_ms(work.heaviest.run)
    for name, step in work.steps.items():
        if not step.graph or median(result.times[name]) > config.longest_graph:
            continue
        try:
            replay = cuda_graph(step.run)
        except RuntimeError as error:  # Some peers copy from the host, which cannot be captured.
            result.metrics["graph_error"] = one_line(error)
            return
        result.times[f"{name}_graph"] = sample_ms(replay, "cuda", config.repeats, config.seconds, config.warm_up)
        if step.bytes is not None:
            result.bytes[f"{name}_graph"] = step.bytes


def attention_workload(
    forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Workload:
    """Return forward, and forward + backward from given gradients of the outputs to new gradients of the leaves."""

    def forward_backward() -> list[Tensor]:
        outputs = forward()
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        return [*outputs, *(gradient for gradient in found if gradient is not None)]

    read, written = _bytes(leaves), _bytes(gradients)
    # Forward reads the leaves; backward reads leaves, outputs and their gradients, and writes gradients of the leaves.
    both = (read + written) + (read + 2 * written + read)
    return Workload(
        {
            "forward": TimedStep(forward, bytes=read + written, graph=True),
            "forward_backward": TimedStep(forward_backward, gradients=True, bytes=both, graph=True),
        }
    )


def small_case(case: Case) -> Case:
    """Return the case at the size of an accuracy check: 512 tokens, two windows, eight buckets, twice the rank.

    On a GPU with all heads: kernels are compiled for their number.
    """
    return replace(case, length=512, batch_size=1, num_heads=case.num_heads if case.device == "cuda" else 2)


def random_qkv(case: Case) -> list[Tensor]:
    """Return standard normal q, k and v of shape (B, T, H, D)."""
    shape = (case.batch_size, case.length, case.num_heads, case.head_dim)
    return [torch.randn(shape, device=case.device).to(case.torch_dtype) for _ in range(3)]


def trainable(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def relative_error(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the largest reference value, the worst over all tensors."""
    return float(relative_errors(outputs, reference).max())


def relative_errors(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return for each tensor the largest difference relative to the largest reference value."""
    errors = [
        (x.detach().double() - truth.detach()).abs().max() / truth.detach().abs().max()
        for x, truth in zip(outputs, reference, strict=True)
    ]
    return torch.stack(errors)


def one_line(error: BaseException | str) -> str:
    """Return the first line of a message, shortened to 200 characters."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    return line if len(line) <= 200 else line[:199] + "…"


def failure(error: Exception) -> Measurement:
    """Return the result of a measurement that raised an error."""
    message = one_line(error)
    return Measurement("out of memory" if says_out_of_memory(message) else "error", message)


def says_out_of_memory(message: str) -> bool:
    """Return whether an error of PyTorch, the C++ runtime or the system reports exhausted memory."""
    text = message.lower()
    return any(words in text for words in ("allocate memory", "out of memory", "bad_alloc", "memoryerror"))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
