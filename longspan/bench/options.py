"""Options of a benchmark run, and the plan that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from longspan.bench.arguments import check_device, check_positive
from longspan.bench.environment import cores
from longspan.bench.subjects.base import Case, MeasurementConfig, Subject
from longspan.bench.subjects.gated import gated_subjects
from longspan.bench.subjects.generation import decode_subjects, generate_subjects
from longspan.bench.subjects.layers import layer_subjects
from longspan.bench.subjects.mechanisms import mechanism_subjects
from longspan.bench.subjects.models import MODELS, compile_subjects, train_subjects
from longspan.bench.subjects.peers import LAYER_PEERS, MODEL_PEERS
from longspan.mechanisms import list_mechanisms
from longspan.utils import choose

DTYPES = ("float32", "float64", "bfloat16", "float16")
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune-no-cudagraphs")

# Subjects, and what each one runs on.
SUBJECTS = {
    "mechanisms": "standard normal q, k, v; forward without gradients; gradients of q, k, v, gates and parameters",
    "layers": "standard normal x; forward without gradients; gradients of x and parameters",
    "train": "random bytes; loss, backward and AdamW; half precision by autocast",
    "generate": "random bytes; greedy tokens after a prompt; older packages read the prompt again for each token",
    "decode": "random bytes; greedy tokens after a prompt, by three APIs with the same model",
    "compile": "random bytes; loss, backward and AdamW, with each mode of torch.compile and without it",
}
SUITES = ("all", "gpu")
_LENGTHS = {"decode": [64]}
CAUSAL_ONLY = ("train", "generate", "decode", "compile")


@dataclass(frozen=True)
class BenchOptions:
    """Options of `longspan bench`, `longspan.bench.run` and `python -m longspan.bench`."""

    subject: str = "mechanisms"
    """mechanisms, layers, train, generate, decode or compile; "all" for all of them, "gpu" for the GPU suite."""
    mechanisms: tuple[str, ...] = ()
    """Mechanisms to measure. By default those that have peers."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths; prompt lengths of generate and decode. By default 8192 and 65536, for decode 64."""
    heads: int = 8
    """Number of heads."""
    head_dim: int = 64
    """Dimension of a head."""
    batch: int = 1
    """Batch size."""
    depth: int = 6
    """Number of layers of a model."""
    compile: str = "off"
    """Mode of torch.compile for layers and train: off, default, reduce-overhead or max-autotune-no-cudagraphs."""
    autocast: bool = False
    """For layers: half precision by autocast with float32 parameters."""
    causal: bool | None = None
    """Causal or bidirectional. By default causal; the suite "all" measures both."""
    dtype: str = "float32"
    """float32, float64, bfloat16 or float16."""
    device: str = "cpu"
    """cpu or cuda."""
    memory_limit: float | None = None
    """GB that a measurement may allocate. By default 85 % of the free memory on the CPU, no limit on CUDA."""
    peers: bool = True
    """Measure other packages too."""
    rounds: int | None = None
    """Processes per subject, interleaved. By default 3, on CUDA 1."""
    repeats: int | None = None
    """Samples per process. By default 5, on CUDA 30."""
    threads: int | None = None
    """CPU threads. By default the number of cores."""
    timeout: float | None = None
    """Seconds after which a measurement is killed. By default 900, on CUDA 180."""
    minutes: float | None = None
    """Time budget of the run: what is not measured by then is recorded as skipped."""
    sections: tuple[str, ...] = ()
    """Sections of a suite to measure. By default all of them."""
    out: Path | None = None
    """The JSON file of the results (runs/bench.json), or the folder of a suite (runs/bench)."""

    def __post_init__(self) -> None:
        choose("subject", self.subject, [*SUBJECTS, *SUITES])
        choose("dtype", self.dtype, DTYPES)
        choose("compile mode", self.compile, COMPILE_MODES)
        if self.subject in CAUSAL_ONLY and self.causal is False:
            raise ValueError(f"bench {self.subject} measures causal models: leave out the option for bidirectional")
        if self.compile != "off" and self.subject not in ("layers", "train", *SUITES):
            raise ValueError("compile is an option of bench layers and bench train")
        if self.autocast and self.subject not in ("layers", *SUITES):
            raise ValueError("autocast is an option of bench layers")
        if self.sections and self.subject not in SUITES:
            raise ValueError(f"sections is an option of the suites {', '.join(SUITES)}, got it for {self.subject}")
        check_positive(self, "lengths", "heads", "head_dim", "batch", "depth")
        check_positive(self, "rounds", "repeats", "threads", "timeout", "minutes")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ValueError(f"memory_limit must be a positive number of GB, got {self.memory_limit:g}")
        if self.subject == "gpu" and self.device != "cuda":
            raise ValueError(f"bench gpu measures on CUDA: set device to cuda, got {self.device}")
        check_device(self.device)

    @property
    def is_suite(self) -> bool:
        """Whether several sections are measured."""
        return self.subject in SUITES

    @property
    def destination(self) -> Path:
        """The JSON file, or the folder of a suite."""
        return self.out or Path("runs/bench" if self.is_suite else "runs/bench.json")

    def measurement_config(self) -> MeasurementConfig:
        """Return the number of samples and the limits of each measurement."""
        cuda = self.device == "cuda"
        limit = self.memory_limit
        if limit is None and not cuda:
            limit = round(0.85 * psutil.virtual_memory().available / 1e9, 1)
        return MeasurementConfig(
            rounds=self.rounds or (1 if cuda else 3),
            repeats=self.repeats or (30 if cuda else 5),
            timeout=self.timeout or (180 if cuda else 900),
            threads=self.threads or cores(),
            memory_limit=limit,
        )


class Section(NamedTuple):
    """Comparisons of one kind, with a results file of their own.

    Attributes:
        name: The name of the results file.
        subject: A key of `SUBJECTS`.
        plan: Mechanism and case of each comparison.
        options: The options that apply.
    """

    name: str
    subject: str
    plan: list[tuple[str, Case]]
    options: BenchOptions

    def subjects(self, mechanism: str, case: Case) -> list[list[Subject]]:
        """Return what is compared: longspan's subjects first, then peers."""
        peers, mode = self.options.peers, self.options.compile
        builders: dict[str, Callable[[], list[list[Subject]]]] = {
            "mechanisms": lambda: (
                gated_subjects(mechanism, case, peers)
                if case.causal and mechanism in ("decay", "delta")
                else [mechanism_subjects(mechanism, case, peers)]
            ),
            "layers": lambda: layer_subjects(mechanism, mode, self.options.autocast, peers),
            "train": lambda: [train_subjects(mechanism, mode, peers)],
            "generate": lambda: [generate_subjects(mechanism, peers)],
            "decode": lambda: decode_subjects(mechanism),
            "compile": lambda: [compile_subjects(mechanism)],
        }
        return builders[self.subject]()


def sections(options: BenchOptions) -> list[Section]:
    """Return what a run measures."""
    found = _gpu_suite(options) if options.subject == "gpu" else _sections(options)
    names = [section.name for section in found]
    wanted = [choose("section", name, names) for name in options.sections]
    return [section for section in found if section.name in (wanted or names)]


def _sections(options: BenchOptions) -> list[Section]:
    """The section of a subject, or all of them, causal and bidirectional where neither is chosen."""
    found = []
    # On a CPU compilation would take most of the time of the suite, and there are no CUDA graphs to compare.
    all_subjects = [name for name in SUBJECTS if name != "compile" or options.device == "cuda"]
    subjects = all_subjects if options.subject == "all" else [options.subject]
    for subject in subjects:
        modes = [True, False] if options.subject == "all" and options.causal is None else [options.causal is not False]
        chosen = _chosen(options, subject)
        for causal in modes:
            if not chosen or (subject in CAUSAL_ONLY and not causal):
                continue
            case = Case(0, options.batch, options.heads, options.head_dim, causal, options.dtype, options.device)
            case = replace(case, depth=options.depth if subject in CAUSAL_ONLY else 1)
            lengths = sorted(set(options.lengths)) or _LENGTHS.get(subject, [8192, 65536])
            plan = [(name, replace(case, length=length)) for name in chosen for length in lengths]
            own = replace(options, compile=options.compile if subject in ("layers", "train") else "off")
            name = subject if causal or options.subject != "all" else f"{subject}-bidirectional"
            found.append(Section(name, subject, plan, own))
    return found


def _chosen(options: BenchOptions, subject: str) -> list[str]:
    """The mechanisms of a subject; a suite ignores those that the subject does not have."""
    with_layers = list(dict.fromkeys(layer.mechanism for layer in LAYER_PEERS.values()))
    replaced = list(dict.fromkeys(peer.mechanism for peer in MODEL_PEERS.values() if peer.replaced))
    tables = {"mechanisms": list(list_mechanisms()), "layers": with_layers, "decode": replaced}
    known = tables.get(subject, list(MODELS))
    if not options.mechanisms:
        return list(MODELS) if subject == "mechanisms" else known
    if options.subject == "all":
        return [name for name in options.mechanisms if choose("mechanism", name, list_mechanisms()) in known]
    return [choose("mechanism", name, known) for name in options.mechanisms]


def _gpu_suite(options: BenchOptions) -> list[Section]:
    """The sections behind the GPU tables of docs/benchmarks.md, in bfloat16. Shapes are (B, H, T, D)."""
    attention = {
        "linear": [(4, 16, 8192, 64), (4, 16, 8192, 128), (1, 16, 65536, 64), (1, 16, 65536, 128), (4, 16, 2048, 64)],
        "performer": [(4, 8, 8192, 64), (1, 8, 65536, 64)],
        "linformer": [(1, 8, 65536, 64)],
    }
    local = {"local": [(4, 8, 8192, 64), (4, 16, 8192, 128), (1, 8, 65536, 64)]}
    few_heads, long = (4, 8, 8192, 128), (1, 8, 65536, 128)
    gated = {"decay": [(4, 16, 8192, 64), (4, 16, 8192, 128), few_heads, long]}
    gated["delta"] = gated["decay"][1:]
    layers = {"linformer": [(1, 8, 65536, 64), (4, 8, 4096, 64)]}
    prompts = (1, 8, 512, 64), (256, 8, 512, 64), (1, 8, 65536, 64), (1, 8, 1_000_000, 64)
    mode = "reduce-overhead" if options.compile == "off" else options.compile
    suite: list[tuple[str, str, bool, Mapping[str, Sequence[tuple[int, int, int, int]]], dict[str, Any]]] = [
        ("causal", "mechanisms", True, attention, {}),
        ("bidirectional", "mechanisms", False, attention, {}),
        ("local", "mechanisms", True, local, {}),
        ("gated", "mechanisms", True, gated, {}),
        ("layers", "layers", False, layers, {}),
        ("layers-autocast", "layers", False, layers, {"autocast": True}),
        ("train", "train", True, dict.fromkeys(MODELS, ((8, 8, 4096, 64), (1, 8, 65536, 64))), {"compile": mode}),
        ("compile", "compile", True, dict.fromkeys(("linear", "softmax"), ((8, 8, 4096, 64),)), {}),
        ("generate", "generate", True, dict.fromkeys([name for name in MODELS if name != "softmax"], prompts), {}),
        ("longest", "mechanisms", True, {"linear": [(1, 16, 4_194_304, 64)]}, {"peers": False}),
    ]
    found = []
    for name, subject, causal, shapes, changes in suite:
        depth = 6 if subject in CAUSAL_ONLY else 1
        plan = [
            (mechanism, Case(T, B, H, D, causal, "bfloat16", options.device, depth))
            for mechanism, each in shapes.items()
            for B, H, T, D in each
        ]
        values: dict[str, Any] = {"compile": "off", "autocast": False, **changes}
        found.append(Section(name, subject, plan, replace(options, **values)))
    return found
