"""Generation after a prompt: by different models, and by different APIs with the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from longspan.bench.subjects.base import AccuracyCheck, Case, Status, Subject, TimedStep, Workload
from longspan.bench.subjects.models import MODELS, ModelSubject, PeerModelSubject, peer_models, random_tokens
from longspan.bench.subjects.peers import MODEL_PEERS, NEW_TOKENS, generate_greedily, unavailable
from longspan.compat.state_dict import CompatModel
from longspan.generation.generate import generate, prefill, stream
from longspan.generation.sampling import Sampling
from longspan.models.transformer import LanguageModel

_GREEDY = Sampling(temperature=0)
_TOKENS = {"cpu": 16, "cuda": 128}  # generated per call


@dataclass(frozen=True)
class GenerateSubject(ModelSubject):
    """Prefill and decoding with a model of `MODELS`."""

    def workload(self, case: Case) -> Workload:
        model = self.build(case).to(case.device, case.torch_dtype).eval()
        prompt, count = random_tokens(case), _TOKENS[case.device]
        if case.device == "cuda":
            running = stream(model, prompt, sampling=_GREEDY)  # reuses one captured graph

            def decode() -> list[Tensor]:
                return [torch.tensor(running.take(count)[1])]
        else:
            session = prefill(model, prompt, max_tokens=NEW_TOKENS)

            def decode() -> list[Tensor]:
                return [torch.tensor(stream(model, session, count, sampling=_GREEDY).take(count)[1])]

        steps = {
            "token": TimedStep(decode, tokens=count * case.batch_size),
            "prefill": TimedStep(lambda: [prefill(model, prompt).logits], tokens=prompt.numel()),
        }
        return Workload(steps, {"state_bytes": model.state_size()})


@dataclass(frozen=True)
class PeerGenerateSubject(PeerModelSubject):
    """Generation by a peer's model; each call reads the prompt again."""

    def workload(self, case: Case) -> Workload:
        peer = MODEL_PEERS[self.name](case)
        peer.net.to(case.device, case.torch_dtype).eval()
        prompt = random_tokens(case)
        step = TimedStep(lambda: [peer.generate(prompt, peer.tokens).float()], tokens=peer.tokens * case.batch_size)
        return Workload({"token": step})


def generate_subjects(mechanism: str, with_peers: bool) -> list[Subject]:
    """Return the models of a mechanism, the one that ratios refer to first, and its peers."""
    subjects: list[Subject] = [GenerateSubject(name) for name in MODELS[mechanism]]
    return subjects + [PeerGenerateSubject(name) for name in peer_models(mechanism)] * with_peers


APIS = ("longspan.generate", "transformers", "older package")


@dataclass(frozen=True)
class DecodeSubject(Subject):
    """Greedy generation through one of `APIS`, all of them with the same model and weights.

    The model is the replacement in `longspan.compat` of a model of `MODEL_PEERS`. The check requires the tokens of
    `longspan.generate`. A call includes the prefill; with a short prompt most of its time is the decode loop.

    Attributes:
        model: The name of the model in `MODEL_PEERS`.
        api: The API to call.
    """

    model: str
    api: str

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        return unavailable("transformers", case) if self.api == "transformers" else None

    def workload(self, case: Case) -> Workload:
        call, prompt = self._build(case), random_tokens(case)
        step = TimedStep(lambda: [call(prompt, NEW_TOKENS).float()], tokens=NEW_TOKENS * case.batch_size)
        return Workload({"token": step})

    def check(self, case: Case) -> AccuracyCheck:
        """Compare the tokens with those of `longspan.generate`."""
        case = replace(case, length=min(case.length, 67), batch_size=1, depth=2, num_heads=2, head_dim=16)
        prompt, tokens = random_tokens(case), []
        for subject in (self, replace(self, api="longspan.generate")):
            torch.manual_seed(0)
            tokens.append(subject._build(case)(prompt, 32))
        error = float((tokens[0] != tokens[1]).double().mean())
        return AccuracyCheck(error, 0.0, "the tokens of longspan.generate")

    def _build(self, case: Case) -> Callable[[Tensor, int], Tensor]:
        """A function (prompt (B, T), count) -> new tokens (B, count)."""
        net = MODEL_PEERS[self.model](case, ours=True).net.to(case.device, case.torch_dtype).eval()
        model = next(module for module in net.modules() if isinstance(module, CompatModel)).to_longspan()
        assert isinstance(model, LanguageModel)
        if self.api == "older package":
            return lambda prompt, count: net.generate(prompt, count, temperature=0.0)  # type: ignore[operator]
        if self.api == "longspan.generate":
            return lambda prompt, count: torch.tensor(generate(model, prompt, count, sampling=_GREEDY).tokens)
        hf = import_module("longspan.hf")
        wrapper = hf.LongspanForCausalLM(hf.LongspanConfig(model.config)).to(case.device, case.torch_dtype).eval()
        wrapper.model.load_state_dict(model.state_dict())
        return partial(generate_greedily, wrapper)


def decode_subjects(mechanism: str) -> list[list[Subject]]:
    """Return, for each replaced peer model of a mechanism, one subject per API, `longspan.generate` first."""
    return [
        [DecodeSubject(f"{api}, {name}", name, api) for api in APIS]
        for name in peer_models(mechanism)
        if MODEL_PEERS[name].replaced
    ]
