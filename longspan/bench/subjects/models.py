"""Training steps of byte-level language models: longspan's and the peers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.bench.subjects.base import AccuracyCheck, Case, Status, Subject, TimedStep, Workload, relative_error
from longspan.bench.subjects.mechanisms import TOLERANCES
from longspan.bench.subjects.peers import MODEL_PEERS, VOCABULARY, unavailable
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.transformer import LanguageModel
from longspan.train.presets import half_local

# The models of each mechanism; ratios of peers refer to the first.
MODELS = {
    "linear": ["linear", "linear, half the heads local", "linear and local layers"],
    "performer": ["performer, half the heads local", "performer"],
    "local": ["local"],
    "linformer": ["linformer"],
    "decay": ["decay, half the heads local", "decay and local layers"],
    "delta": ["delta, half the heads local", "delta and local layers"],
    "softmax": ["softmax"],
}


def model_config(name: str, case: Case) -> ModelConfig:
    """Return the configuration of a model of `MODELS`."""
    local = {"mechanism": "local", "window": 256}
    linear = {"mechanism": "linear"}
    performer = {"mechanism": "performer", "num_features": 256}
    linformer = {"mechanism": "linformer", "rank": 256, "max_length": 4096, "periodic": True}
    by_part = ("halves", "none")
    options: dict[str, tuple[Any, Any]] = {
        "linear": ("linear", "none"),
        "linear, half the heads local": (half_local(case.num_heads, 256, linear), by_part),
        "linear and local layers": (("linear", local), "halves"),
        "performer": (performer, "none"),
        "performer, half the heads local": (half_local(case.num_heads, 256, performer), by_part),
        "local": (local, "halves"),
        "linformer": (linformer, "none"),
        "decay, half the heads local": (half_local(case.num_heads, 256, {"mechanism": "decay"}), by_part),
        "decay and local layers": (("decay", local), {"local": "halves"}),
        "delta, half the heads local": (half_local(case.num_heads, 256, {"mechanism": "delta"}), by_part),
        "delta and local layers": (("delta", local), {"local": "halves"}),
        "softmax": ("softmax", "halves"),
    }
    mechanism, rotary = options[name]
    # The layers of the literature around a gated memory.
    gated: dict[str, Any] = {"conv_size": 4, "out_norm": True} if name.startswith(("decay", "delta")) else {}
    attention = AttentionConfig(
        num_heads=case.num_heads, head_dim=case.head_dim, mechanism=mechanism, rotary=rotary, **gated
    )
    return ModelConfig(
        dim=case.dim, depth=case.depth, causal=True, vocab_size=VOCABULARY, tie_embeddings=True, attention=attention
    )


@dataclass(frozen=True)
class ModelSubject(Subject):
    """A language model of `MODELS`."""

    def build(self, case: Case) -> LanguageModel:
        """Build the model with random weights."""
        return LanguageModel(model_config(self.name, case))

    def check(self, case: Case) -> AccuracyCheck:
        """Compare the logits of token-by-token decoding with those of the parallel forward."""
        case = replace(case, length=67, batch_size=1, depth=2, num_heads=2, head_dim=16, dtype="float32")
        model = self.build(case).to(case.device).eval()
        tokens = random_tokens(case)
        with torch.no_grad():
            state, logits = model.new_state(1), []
            for i in range(tokens.shape[1]):
                out, state = model.extend(tokens[:, i : i + 1], state)
                logits.append(out)
            error = relative_error([torch.cat(logits, 1)], [model(tokens).double()])
        return AccuracyCheck(error, 1e-4, "its parallel forward")


@dataclass(frozen=True)
class TrainSubject(ModelSubject):
    """A training step of a model. `compile` is the mode of `torch.compile`, or "off"."""

    compile: str = "off"

    def workload(self, case: Case) -> Workload:
        model = self.build(case).to(case.device)
        loss: Callable[..., Tensor] = model.loss
        if self.compile != "off":
            loss = torch.compile(loss, fullgraph=True, mode=self.compile)
        steps, metrics = training_workload(case, model, loss)
        return Workload(steps, {**metrics, "compile": self.compile})


@dataclass(frozen=True)
class PeerModelSubject(Subject):
    """A language model by its name in `MODEL_PEERS`."""

    @property
    def package(self) -> str:
        return MODEL_PEERS[self.name].package

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        return unavailable(self.package, case, not_on_cpu=MODEL_PEERS[self.name].not_on_cpu)

    def check(self, case: Case) -> AccuracyCheck | None:
        """Compare one layer's logits in float32 with longspan's replacement in float64, with equal weights."""
        kind = MODEL_PEERS[self.name]
        if not kind.replaced:
            return None
        case = replace(case, length=512, batch_size=1, depth=1, num_heads=2, head_dim=16, dtype="float32")
        original, replacement = (kind(case, ours=ours) for ours in (False, True))
        replacement.net.load_state_dict(original.net.state_dict())
        replacement.net.double()
        tokens, logits = random_tokens(case), []
        with torch.no_grad():
            for peer in (original, replacement):
                peer.net.eval().to(case.device)
                logits.append(peer.logits(tokens))
        found, reference = (x[:, -1:] if kind.leaks else x for x in logits)
        error = relative_error([found], [reference])
        return AccuracyCheck(error, TOLERANCES["float32"], "longspan with its weights in float64")


@dataclass(frozen=True)
class PeerTrainSubject(PeerModelSubject):
    """A training step of a peer's model."""

    def workload(self, case: Case) -> Workload:
        peer = MODEL_PEERS[self.name](case)
        peer.net.to(case.device)
        return training_workload(case, peer.net, peer.loss)


def train_subjects(mechanism: str, compile_mode: str, with_peers: bool) -> list[Subject]:
    """Return the models of a mechanism, the one that ratios refer to first, and its peers."""
    subjects: list[Subject] = [TrainSubject(name, compile_mode) for name in MODELS[mechanism]]
    return subjects + [PeerTrainSubject(name) for name in peer_models(mechanism)] * with_peers


def compile_subjects(mechanism: str) -> list[Subject]:
    """Return the first model of a mechanism with each mode of torch.compile that the trainer chooses, and without."""
    return [TrainSubject(MODELS[mechanism][0], mode) for mode in ("reduce-overhead", "default", "off")]


def peer_models(mechanism: str) -> list[str]:
    """Return the names of a mechanism's peers in `MODEL_PEERS`."""
    return [name for name, peer in MODEL_PEERS.items() if peer.mechanism == mechanism]


def training_workload(case: Case, model: nn.Module, loss_function: Callable[[Tensor], Tensor]) -> Workload:
    """Return a step of loss, backward and AdamW; half precision is autocast around float32 parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = random_tokens(case)
    half = case.dtype in ("bfloat16", "float16")

    def step() -> list[Tensor]:
        with torch.autocast(case.device, case.torch_dtype if half else None, enabled=half):
            loss = loss_function(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Workload({"step": TimedStep(step, gradients=True, tokens=tokens.numel())}, {"parameters": parameters})


def random_tokens(case: Case) -> Tensor:
    """Return random bytes (B, T)."""
    return torch.randint(1, VOCABULARY, (case.batch_size, case.length)).to(case.device)
