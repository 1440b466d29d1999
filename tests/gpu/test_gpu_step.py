"""Decoding on a GPU: the kernels of a decode step, and generation from a captured CUDA graph."""

from __future__ import annotations

import itertools

import pytest
import torch
from step_cases import CASES, compare
from token_cases import (
    HEADS,
    LAYERS,
    NORMS,
    OUTPUTS,
    SAMPLINGS,
    compare_embedding,
    compare_heads,
    compare_layers,
    compare_norms,
    compare_outputs,
    compare_rotary,
    compare_samples,
    compare_slot_samples,
)

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling, generate, stream
from longspan.generation.decode import DecodeLoop
from longspan.generation.generate import prefill
from longspan.mechanisms import gated, linear, linformer, local
from longspan.ops import decode

LOCAL = {"mechanism": "local", "window": 7}
MODELS: dict[str, dict] = {
    "linear": {"mechanism": "linear", "num_kv_heads": 2},
    "performer": {"mechanism": {"mechanism": "performer", "num_features": 33}},
    "local": {"mechanism": LOCAL, "rotary": "halves"},
    "linformer": {"mechanism": {"mechanism": "linformer", "rank": 5, "max_length": 512}, "rotary": "interleaved"},
    "softmax": {"mechanism": "softmax", "rotary": "halves"},
    "parallel": {"mechanism": LOCAL, "rotary": "halves", "rotary_dim": 10},
    "decay": {"mechanism": "decay", "num_kv_heads": 2, "qk_norm": True},
    "decay by channel": {"mechanism": {"mechanism": "decay", "gate": "channel"}, "out_norm": True},
    "delta": {"mechanism": "delta", "conv_size": 4, "qk_norm": True, "out_norm": True, "out_gate": "silu"},
    "delta by channel": {
        "mechanism": {"mechanism": "delta", "gate": "channel"},
        "num_qk_heads": 2,
        "value_gates": True,
    },
    "split": {
        "mechanism": {
            "mechanism": "split",
            "parts": [{**LOCAL, "num_heads": 2}, {"mechanism": "performer", "num_heads": 2}],
        },
        "rotary": ("halves", "none"),
    },
}
by_model = pytest.mark.parametrize("name", MODELS)


def model(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    torch.manual_seed(3)
    attention = AttentionConfig(num_heads=4, **MODELS[name])
    residual = "parallel" if name == "parallel" else "single"
    sizes = {"dim": 64, "depth": 2, "vocab_size": 37, "token_shift": (0, 1), "residual": residual}
    config = ModelConfig(causal=True, attention=attention, **sizes)
    return LanguageModel(config).eval().to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_decode_kernels(name: str, dtype: torch.dtype) -> None:
    compare(name, dtype, "cuda", steps=37)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: torch.dtype) -> None:
    compare_layers(name, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, dtype: torch.dtype) -> None:
    compare_heads(name, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str, dtype: torch.dtype) -> None:
    compare_outputs(name, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, dtype: torch.dtype) -> None:
    compare_norms(name, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_embedding(dtype: torch.dtype) -> None:
    compare_embedding(dtype, "cuda")


def test_rotary() -> None:
    compare_rotary("cuda")


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("vocabulary", [131, 5003])
def test_samples(name: str, vocabulary: int) -> None:
    compare_samples(name, "cuda", vocabulary, 37)


@pytest.mark.parametrize("vocabulary", [131, 257, 32000])
def test_samples_of_slots(vocabulary: int) -> None:
    compare_slot_samples("cuda", vocabulary)


@by_model
@pytest.mark.parametrize("rows", [1, 3, 67])
def test_a_step_in_bfloat16(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a step of eager PyTorch in bfloat16 and in float64, by the tolerance rule."""
    lm = model(name, torch.bfloat16)
    wide = model(name, torch.bfloat16).cpu().double()
    tokens = torch.randint(37, (rows, 13))
    logits: dict[str, list[torch.Tensor]] = {}
    for how, one in (("kernels", lm), ("eager", lm), ("exact", wide)):
        if how == "eager":
            for module in (decode, gated, linear, local, linformer):
                monkeypatch.setattr(module, "why_not_triton", lambda *_, **__: "disabled")
        given = tokens.to(next(one.parameters()).device)
        state = stream(one, prefill(one, given[:, :7], max_tokens=6))._loop._state
        with torch.inference_mode():
            logits[how] = []
            for i in range(7, 13):
                out, state = one.decode_step(given[:, i], state)
                logits[how].append(out.double().cpu())
    found, eager, exact = (torch.stack(logits[how]) for how in ("kernels", "eager", "exact"))
    allowed = 2 * (eager - exact).abs().max() + exact.abs().max() * torch.finfo(torch.bfloat16).eps
    assert (found - exact).abs().max() <= allowed


@by_model
def test_a_captured_step_agrees_with_the_parallel_form(name: str) -> None:
    lm = model(name)
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8] * 11]
    said = generate(lm, prompts, 40, sampling=Sampling(temperature=0))
    for prompt, tokens, logs in zip(prompts, said.tokens, said.log_probabilities, strict=True):
        assert len(tokens) == 40
        assert all(log == 0 for log in logs)
        with torch.no_grad():
            logits = lm(torch.tensor([prompt + tokens], device="cuda"))[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        # The likeliest token, or one within rounding of it.
        assert ((chosen == best) | (best - chosen < 1e-3)).all()


@by_model
def test_graph_and_eager_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model(name)
    how = {"sampling": Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2), "seed": 5}
    captured = generate(lm, [[1, 2, 3], [4]], 30, **how)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replays.append(1) or replay(self))
    assert generate(lm, [[1, 2, 3], [4]], 30, **how).tokens == captured.tokens
    assert len(replays) > 20
    elsewhere = itertools.count()
    monkeypatch.setattr(DecodeLoop, "_addresses", lambda self: {"never the same": next(elsewhere)})
    replays.clear()
    assert generate(lm, [[1, 2, 3], [4]], 30, **how).tokens == captured.tokens
    assert not replays


def test_a_stream_can_be_resumed() -> None:
    lm = model("split")
    whole = [tokens for tokens, _ in stream(lm, [1, 2, 3], 24, sampling=Sampling(temperature=0))]
    first = stream(lm, [1, 2, 3], 24, sampling=Sampling(temperature=0))
    begun = [next(first)[0] for _ in range(12)]
    memory = first.session
    rest = [tokens for tokens, _ in stream(lm, memory, 12, sampling=Sampling(temperature=0))]
    assert begun + rest == whole
    assert begun + [tokens for tokens, _ in first] == whole


def test_stopping() -> None:
    lm = model("linear")
    free = generate(lm, [[1, 2], [3]], 64, sampling=Sampling(temperature=1), seed=2)
    stop = free.tokens[0][40]
    found = generate(lm, [[1, 2], [3]], 64, sampling=Sampling(temperature=1), seed=2, stop=[stop])
    for row, tokens in zip(found.tokens, free.tokens, strict=True):
        assert row == tokens[: tokens.index(stop) if stop in tokens else None]


def test_a_growing_state_is_not_captured() -> None:
    lm = model("softmax")
    memory = prefill(lm, [1, 2, 3])  # without max_tokens it grows
    loop = stream(lm, memory, 12)._loop
    with torch.inference_mode():
        for _ in range(12):
            loop.step()
    assert loop._graph is None


@by_model
def test_rolling_back_is_never_having_generated(name: str) -> None:
    lm = model(name)
    session = prefill(lm, [[1, 2, 3, 4, 5], [6, 7]], max_tokens=40)
    wanted = [tokens for tokens, _ in stream(lm, session, 30)]
    steps = stream(lm, session, 40)
    first = [next(steps)[0] for _ in range(9)]
    steps._loop.snapshot()
    for number in (1, 5):
        for _ in range(5):
            next(steps)
        steps._loop.rollback(number)  # 4 tokens are left, then none
        if number == 1:
            steps._loop.rollback(4)
    assert first + [next(steps)[0] for _ in range(21)] == wanted
