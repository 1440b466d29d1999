"""Whole language models as subjects: a training step, and generation after a prompt, beside the older packages' own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longspan.bench.runner import Case, Check, Status, Step, Subject, Work
from longspan.bench.subjects.mechanisms import TOLERANCES, relative_error
from longspan.bench.subjects.peers import installed_version
from longspan.generation.generate import prefill, stream
from longspan.generation.sampling import Sampling
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.transformer import LanguageModel

VOCABULARY = 256
TASKS = ("train", "generate")
_TOKENS = 16  # generated in one measurement
_GREEDY = Sampling(temperature=0)


def _attention(case: Case, name: str) -> AttentionConfig:
    local = {"mechanism": "local", "window": 256}
    half = case.num_heads // 2

    def beside_local(other: dict[str, Any]) -> dict[str, Any]:
        parts = [{**local, "num_heads": half}, {**other, "num_heads": case.num_heads - half}]
        return {"mechanism": {"mechanism": "split", "parts": parts}, "rotary": ("halves", "none")}

    options: dict[str, dict[str, Any]] = {
        "linear": {"mechanism": "linear"},
        "performer, half the heads local": beside_local({"mechanism": "performer", "num_features": 256}),
        "local": {"mechanism": local, "rotary": "halves"},
        "linformer": {"mechanism": {"mechanism": "linformer", "rank": 256, "max_length": case.length + 4 * _TOKENS}},
        "linear, half the heads local": beside_local({"mechanism": "linear"}),
        "softmax": {"mechanism": "softmax", "rotary": "halves"},
    }
    return AttentionConfig(num_heads=case.num_heads, head_dim=case.head_dim, **options[name])


MODELS = {
    "linear": ["linear", "linear, half the heads local"],
    "performer": ["performer, half the heads local"],
    "local": ["local"],
    "linformer": ["linformer"],
    "softmax": ["softmax"],
}


@dataclass(frozen=True)
class OurModel(Subject):
    """A longspan language model on bytes. compiled: by torch.compile, where that is asked for."""

    task: str
    compiled: bool = False

    def build(self, case: Case) -> LanguageModel:
        config = ModelConfig(
            dim=case.dim,
            depth=case.depth,
            causal=True,
            vocab_size=VOCABULARY,
            attention=_attention(case, self.name),
        )
        return LanguageModel(config)

    def work(self, case: Case) -> Work:
        model = self.build(case)
        if self.task == "train":
            loss: Callable[..., Tensor] = model.to(case.device).loss
            return training_work(case, model, torch.compile(loss) if self.compiled else loss)
        model = model.to(case.device, case.torch_dtype).eval()
        prompt = random_tokens(case)
        memory = prefill(model, prompt, max_tokens=4 * _TOKENS)

        def tokens() -> list[Tensor]:
            said = [row for row, _ in stream(model, memory, _TOKENS, sampling=_GREEDY)]
            return [torch.tensor(said, dtype=torch.float32)]

        return {
            "token": Step(tokens, tokens=_TOKENS * case.batch_size),
            "prefill": Step(lambda: [prefill(model, prompt).logits], tokens=prompt.numel()),
        }

    def check(self, case: Case) -> Check:
        """What the model says step by step against what it says at once."""
        case = replace(case, length=67, batch_size=1, depth=2, num_heads=2, head_dim=16, dtype="float32")
        model = self.build(case).to(case.device).eval()
        tokens = random_tokens(case)
        with torch.no_grad():
            state, logits = model.new_state(1), []
            for i in range(tokens.shape[1]):
                out, state = model.extend(tokens[:, i : i + 1], state)
                logits.append(out)
            error = relative_error([torch.cat(logits, 1)], [model(tokens).double()])
        return Check(error, 1e-4, "itself at once")


class OlderModel(ABC):
    """One way of calling one package's language model, or longspan in its place with the same arguments.

    library: the package's module; where longspan can take its place, longspan.compat has one of the same name.
    leaks: whether the future moves the past, so that only the last token is right.
    """

    mechanism: ClassVar[str]
    package: ClassVar[str]
    library: ClassVar[str]
    replaced: ClassVar[bool] = True  # whether longspan can take its place
    leaks: ClassVar[bool] = False
    tokens: ClassVar[int] = 2  # generated in one measurement: each recomputes what came before

    def __init__(self, case: Case, *, ours: bool = False) -> None:
        self.net = self.build(case, import_module(f"longspan.compat.{self.library}" if ours else self.library))

    @abstractmethod
    def build(self, case: Case, library: Any) -> nn.Module: ...

    @abstractmethod
    def loss(self, tokens: Tensor) -> Tensor: ...

    def generate(self, prompt: Tensor, number: int) -> Tensor:
        return self.net.generate(prompt, number)  # type: ignore[operator]


class LinearAttentionTransformerLM(OlderModel):
    mechanism, package, library = "linear", "linear-attention-transformer", "linear_attention_transformer"

    def build(self, case: Case, library: Any) -> nn.Module:
        local = {"n_local_attn_heads": case.num_heads // 2, "local_attn_window_size": 256}
        model = library.LinearAttentionTransformerLM(**_sizes(case), causal=True, blindspot_size=64, **local)
        return library.AutoregressiveWrapper(model)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, return_loss=True)


class PerformerLM(OlderModel):
    mechanism, package, library = "performer", "performer-pytorch", "performer_pytorch"
    leaks = True

    def build(self, case: Case, library: Any) -> nn.Module:
        local = {"local_attn_heads": case.num_heads // 2, "local_window_size": 256}
        model = library.PerformerLM(**_sizes(case), causal=True, nb_features=256, **local)
        return library.AutoregressiveWrapper(model)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class LocalTransformer(OlderModel):
    mechanism, package, library = "local", "local-attention", "local_attention"

    def build(self, case: Case, library: Any) -> nn.Module:
        return library.LocalTransformer(**_sizes(case), local_attn_window_size=256)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, return_loss=True)


class FlashLinearAttention(OlderModel):
    mechanism, package, library = "linear", "flash-linear-attention", "fla.models"
    replaced = False
    tokens = _TOKENS

    def build(self, case: Case, library: Any) -> nn.Module:
        config = library.LinearAttentionConfig(
            hidden_size=case.dim,
            num_hidden_layers=case.depth,
            num_heads=case.num_heads,
            vocab_size=VOCABULARY,
            norm_q=False,
            use_cache=True,
        )
        return library.LinearAttentionForCausalLM(config)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, labels=tokens).loss

    def generate(self, prompt: Tensor, number: int) -> Tensor:
        how = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False, "pad_token_id": 0}
        return self.net.generate(prompt, **how)  # type: ignore[operator]


OLDER: dict[str, type[OlderModel]] = {
    "linear-attention-transformer, half local": LinearAttentionTransformerLM,
    "performer-pytorch, half local": PerformerLM,
    "local-attention": LocalTransformer,
    "flash-linear-attention": FlashLinearAttention,
}


@dataclass(frozen=True)
class TheirModel(Subject):
    """An older package's language model, by its name in `OLDER`."""

    task: str

    @property
    def package(self) -> str:
        return OLDER[self.name].package

    def unfit(self, case: Case) -> tuple[Status, str] | None:
        if installed_version(self.package) is None:
            return "not installed", f"{self.package} is not installed: pip install {self.package}"
        if self.package == "flash-linear-attention" and case.device != "cuda":
            return "not supported", "flash-linear-attention has no CPU path"
        return None

    def work(self, case: Case) -> Work:
        older = OLDER[self.name](case)
        if self.task == "train":
            older.net.to(case.device)
            return training_work(case, older.net, older.loss)
        older.net.to(case.device, case.torch_dtype).eval()
        prompt = random_tokens(case)
        return {
            "token": Step(lambda: [older.generate(prompt, older.tokens).float()], tokens=older.tokens * case.batch_size)
        }

    def check(self, case: Case) -> Check | None:
        """One layer's logits in float32 against ours in its place, with its weights, in float64."""
        if not OLDER[self.name].replaced:
            return None
        case = replace(case, length=512, batch_size=1, depth=1, num_heads=2, head_dim=16, dtype="float32")
        theirs, ours = (OLDER[self.name](case, ours=ours).net.eval() for ours in (False, True))
        ours.load_state_dict(theirs.state_dict())
        tokens = random_tokens(case)
        with torch.no_grad():
            logits = [_inner(net.to(case.device))(tokens) for net in (theirs, ours.double())]
        found, truth = (x[:, -1:] if OLDER[self.name].leaks else x for x in logits)
        return Check(relative_error([found], [truth]), TOLERANCES["float32"], "ours with its weights in float64")


def our_models(mechanism: str, task: str, compiled: bool) -> list[Subject]:
    """The models of a mechanism, the one to compare with first."""
    return [OurModel(name, task, compiled) for name in MODELS[mechanism]]


def their_models(mechanism: str, task: str) -> list[Subject]:
    """The peers of a mechanism, those that are not installed included."""
    return [TheirModel(name, task) for name, older in OLDER.items() if older.mechanism == mechanism]


def training_work(case: Case, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Work:
    """A whole step: loss, backward, AdamW; half precision means autocast around parameters in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = random_tokens(case)

    def autocast() -> AbstractContextManager[Any]:
        half = case.dtype in ("bfloat16", "float16")
        return torch.autocast(case.device, case.torch_dtype) if half else nullcontext()

    def step() -> list[Tensor]:
        with autocast():
            loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return {"step": Step(step, gradients=True, tokens=tokens.numel())}


def random_tokens(case: Case) -> Tensor:
    """(B, T) bytes."""
    return torch.randint(1, VOCABULARY, (case.batch_size, case.length)).to(case.device)


def _inner(net: nn.Module) -> nn.Module:
    """What a wrapper for training and generation calls."""
    inner = getattr(net, "net", net)
    assert isinstance(inner, nn.Module)
    return inner


def _sizes(case: Case) -> dict[str, int]:
    """What the older language models all call by the same names."""
    # Room for what is generated, in the multiples that they ask for.
    room = -(-(case.length + 4 * _TOKENS) // 256) * 256
    shape = {"dim": case.dim, "depth": case.depth, "heads": case.num_heads, "dim_head": case.head_dim}
    return {"num_tokens": VOCABULARY, "max_seq_len": room, **shape}
