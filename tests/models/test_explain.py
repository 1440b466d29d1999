"""`longspan.explain` tells what really runs: its decisions are those of the call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import AttentionConfig, LanguageModel, ModelConfig, Packing, build_mechanism, explain
from longspan.cli import main
from longspan.models import explain as module
from longspan.ops import (
    compressed,
    features,
    gated,
    gates,
    hedgehog,
    l2_norm,
    linear,
    merge,
    normalizer,
    rotary,
    window,
)
from longspan.ops import decode as decode_op
from longspan.ops.common import dispatch, plans

H, D = 4, 16
PARTS = [{"mechanism": "local", "num_heads": 2, "window": 7}, {"mechanism": "delta", "num_heads": 2}]
DELTA = ["gates", "l2_norm", "delta"]
# Mechanism, options, and the algorithms of causal attention, bidirectional attention and a decode step on a GPU.
CASES: list[tuple[str, dict[str, Any], list[str], list[str], list[str]]] = [
    ("linear", {}, ["fused_chunk"], ["bidirectional"], ["decode"]),
    (
        "linear",
        {"feature_map": "softmax", "normalize": "feature"},
        ["normalizer", "chunk"],
        ["bidirectional"],
        ["decode"],
    ),
    (
        "linear",
        {"feature_map": "hedgehog", "normalize": "none"},
        ["hedgehog", "chunk"],
        ["hedgehog", "bidirectional"],
        ["hedgehog"],
    ),
    ("linear", {"feature_map": "hedgehog"}, ["hedgehog", "fused_chunk"], ["hedgehog", "bidirectional"], ["hedgehog"]),
    ("performer", {"num_features": 31}, ["favor"], ["bidirectional"], ["decode"]),
    ("performer", {"num_features": 31, "epsilon": 0.1}, ["favor"], ["favor_bidirectional"], []),
    ("performer", {"num_features": 311}, ["favor"], ["favor_bidirectional"], []),
    ("local", {"window": 7}, ["window"], ["window"], ["decode"]),
    ("local", {"window": 7, "xpos": 128.0}, ["window"], ["window"], []),
    ("local", {"window": 7, "xpos": 2.0}, ["window"], ["window"], []),
    ("local", {"window": 2, "bias": torch.zeros(4, 1, 3)}, ["window"], ["window"], []),
    ("linformer", {"rank": 11, "max_length": 257}, ["causal"], ["compressed"], ["decode"]),
    ("decay", {}, ["gates", "decay"], ["gates", "decay"], ["decode"]),
    ("decay", {"gate": "fixed"}, ["decay"], ["decay"], ["decode"]),
    ("decay", {"gate": "channel"}, ["gates", "channel"], ["gates", "channel"], ["decode"]),
    ("delta", {}, DELTA, DELTA, ["decode"]),
    ("softmax", {}, [], [], []),
    ("split", {"parts": PARTS}, ["window", *DELTA], ["window", *DELTA], ["decode"]),
]


class Spy:
    """Instead of a module of kernels: notes that it was reached, and returns empty results."""

    def __init__(self, name: str, reached: list[str], fake: Callable[..., Any] | None = None) -> None:
        self.name, self.reached, self.fake = name, reached, fake

    def saved_size(self, *args: Any) -> int:
        return 0

    def takes(self, *args: Any) -> bool:
        return False

    def forward(self, *args: Any, **options: Any) -> Any:
        self.reached.append(self.name)
        assert self.fake is not None
        return self.fake(*args)

    def forward_plan(self, _: Any, problem: Any) -> Callable[..., Any]:
        return lambda x: self.forward(x, problem)

    @property
    def WindowPlan(self) -> Any:  # noqa: N802
        def of(_: Any, *options: Any) -> Any:
            return SimpleNamespace(attend=lambda *tensors: self.forward(window.WindowProblem(*tensors, *options)))

        return SimpleNamespace(of=of)

    def __getattr__(self, function: str) -> Callable[..., Tensor]:
        assert function.startswith("decode_")

        def step(inputs: tuple[Tensor, ...], *args: Any) -> Tensor:
            self.reached.append("decode")
            return inputs[0].new_empty(*inputs[0].shape[:3], inputs[2].shape[3])

        return step


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let kernels seem to be available, and return the list of modules that calls reach."""
    reached: list[str] = []

    def causal_or_not(x: Any, problem: Any) -> Any:
        if isinstance(problem, linear.BidirectionalProblem):
            return linear._Bidirectional.fake(*x, *problem)
        out, kv, shift, den, starts, _ = linear._CausalLinear.fake(*x, *problem)
        return (out, kv, shift, den, starts) if problem.output_final_state else (out, None, None, den, starts)

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])

    def windowed(problem: window.WindowProblem) -> Any:
        return window._Window.fake(*problem)

    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(linear, "_kernels", lambda name: Spy(name, reached, causal_or_not))
    monkeypatch.setattr(
        gated, "_kernels", lambda name: Spy(name, reached, lambda x, problem: gated._GatedLinear.fake(*x, *problem))
    )
    activate = Spy("gates", reached, lambda x, options: gates._ActivateGates.fake(*x, *options))
    monkeypatch.setattr(gates, "_kernels", lambda: activate)
    monkeypatch.setattr(l2_norm, "_kernels", lambda: Spy("l2_norm", reached, l2_norm._L2Norm.fake))
    monkeypatch.setattr(window, "kernels", lambda: Spy("window", reached, windowed))
    monkeypatch.setattr(compressed.fused, "kernels", lambda: Spy("compressed", reached, attention))
    causal = Spy("causal", reached, lambda x: compressed._CausalLinformer.fake(*x))
    monkeypatch.setattr(compressed, "_causal_kernels", lambda: causal)
    spies = [
        (normalizer, Spy("normalizer", reached, lambda x, problem: normalizer._NormalizedFeatures.fake(*x, *problem))),
        (features, Spy("features", reached, lambda x, problem: features._FeatureAttention.fake(*x, *problem))),
        (merge, Spy("merge", reached, lambda x: merge._Merge.fake(*x))),
    ]
    for op, spy in spies:
        monkeypatch.setattr(op, "_kernels", lambda spy=spy: spy)
    rotate = SimpleNamespace(rotate=lambda x, *args, **options: x.new_empty(x.shape))
    monkeypatch.setattr(rotary, "_kernels", lambda: rotate)
    monkeypatch.setattr(hedgehog._Hedgehog, "kernels", lambda: Spy("hedgehog", reached, hedgehog._Hedgehog.fake))
    monkeypatch.setattr(decode_op, "kernels", lambda name: Spy(name, reached))
    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    monkeypatch.setattr(dispatch, "why_no_triton", lambda: None)
    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: 227)
    return reached


def call(mechanism: longspan.Mechanism, T: int, *, decode: bool = False, causal: bool = True, **layout: Any) -> None:
    """Call a mechanism on meta tensors that pretend to be on a GPU, without `dispatch.recording`."""
    twin = module._without_data(mechanism, torch.bfloat16).eval()
    assert isinstance(twin, longspan.Mechanism)
    with module._OnDevice(torch.device("cuda:0")), torch.no_grad():
        q, k, v = (torch.empty(1, T, H, D, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        raw = q.new_empty(1, T, H, twin.num_gates) if twin.num_gates else None
        if decode:
            state = twin.decode_state(twin.new_state(1, device=q.device, dtype=q.dtype), q.dtype)
            twin.decode_step(state, q, k, v, gates=raw)
        else:
            twin(q, k, v, gates=raw, causal=causal, **layout)


def algorithms(found: longspan.models.explain.Explanation) -> list[str]:
    """The modules of Triton kernels, in the order of the calls."""
    return [decision.algorithm for decision in found.decisions if decision.algorithm not in ("torch", "sdpa")]


@pytest.mark.parametrize(("name", "options", "causal", "bidirectional", "step"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore")  # autocast's own, where there is no GPU
def test_what_is_explained_is_what_a_gpu_call_reaches(
    name: str,
    options: dict[str, Any],
    causal: list[str],
    bidirectional: list[str],
    step: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mechanism = build_mechanism(name, H, D, **options)
    explained = [
        (explain(mechanism, 1, 257, causal=True), causal, {"T": 257}),
        (explain(mechanism, 1, 257, causal=False), bidirectional, {"T": 257, "causal": False}),
        (explain(mechanism, 1, 257, decode=True), step, {"T": 1, "decode": True}),
        (explain(mechanism, packed=[131, 126]), causal, {"T": 257, "packing": Packing.from_lengths([131, 126])}),
    ]
    reached = spied(monkeypatch)
    for found, expected, arguments in explained:
        assert algorithms(found) == expected
        reached.clear()
        call(mechanism, **arguments)
        assert list(dict.fromkeys(reached)) == expected
        # Whatever is not on kernels has a reason.
        assert all((decision.why is None) == (decision.algorithm != "torch") for decision in found.decisions)
        assert bool(expected) or name == "softmax" or not found.on_kernels


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.filterwarnings("ignore")  # autocast's own, where there is no GPU
def test_a_mixture(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = build_mechanism("mixture", H, D, window=7)
    expected = {"window", "hedgehog", "features"} | ({"merge"} if causal else set())
    assert set(algorithms(explain(mechanism, 1, 257, causal=causal))) == expected
    reached = spied(monkeypatch)
    call(mechanism, 257, causal=causal)
    assert set(reached) == expected


@pytest.mark.parametrize(
    ("options", "arguments", "why"),
    [
        ({}, {"device": "cpu"}, "the tensors are on cpu; the kernels need CUDA"),
        ({}, {"dtype": "float64"}, "q, k and v are float64, float64, float64; the kernels take one dtype"),
        ({}, {"head_dim": 257}, "over 256"),
        ({}, {"length": 1}, "it calls no operation that has kernels"),
        ({"blind_spot": 3}, {}, "a blind spot (3)"),
        ({"feature_map": "softmax", "normalize": "feature"}, {"dtype": "float32"}, "normalization by feature"),
        ({}, {"value_dim": 263}, "over 256"),
    ],
)
def test_a_reason_is_given(options: dict[str, Any], arguments: dict[str, Any], why: str) -> None:
    found = explain("linear", **{"length": 67, "num_heads": 2, **arguments, **options})
    assert not found.on_kernels
    assert any(why in (decision.why or "") for decision in found.decisions)
    assert why in str(found)


@pytest.mark.parametrize("name", ["softmax", "local", "linear", "performer", "linformer", "mixture", "decay", "delta"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_decode_step_on_a_cpu(name: str, batch_size: int) -> None:
    found = explain(name, batch_size, 67, num_heads=2, decode=True, device="cpu", dtype="float32")
    assert found.decisions[0].operation in ("decode step", "softmax attention")


def test_every_argument_is_part_of_the_call() -> None:
    text = str(explain("local", 3, 67, training=True, padded=True, dtype=torch.float16, window=5))
    assert text.splitlines()[0] == "3 × 67 tokens, float16, on cuda, training, padded:"
    assert str(explain("local", packed=[3, 5], window=5)).startswith("packed sequences of [3, 5], bfloat16")
    assert str(explain("local", 3, 67, decode=True)).startswith("a decode step after 3 × 67 tokens")
    crossed = explain("linear", 2, 67, key_length=131)
    assert str(crossed).startswith("2 × 67 tokens to 131 keys")
    assert algorithms(crossed) == ["bidirectional"]
    # A mask keeps Linformer from its kernel for compression, training keeps dropout from that of attention.
    masked = explain("linformer", 1, 257, causal=False, padded=True, rank=11, max_length=257)
    assert masked.decisions[0][::2] == ("compression of keys and values", "a mask")
    dropped = {"causal": False, "rank": 11, "max_length": 257, "dropout": 0.1}
    assert algorithms(explain("linformer", 1, 257, **dropped)) == ["compressed"]
    dropping = explain("linformer", 1, 257, training=True, **dropped)
    assert (algorithms(dropping), dropping.decisions[0].why) == ([], "dropout")
    biased = explain("linformer", 1, 257, causal=False, rank=11, max_length=257, bias=True, periodic=True)
    assert biased.decisions[0].why == "a bias, a periodic table"
    assert algorithms(explain("linear", 1, 67, num_heads=2, head_dim=128)) == ["fused_chunk"]
    assert algorithms(explain("linear", 1, 67, num_heads=2, head_dim=192)) == ["tiled_chunk"]
    assert algorithms(explain("linear", 1, 67, dtype="float32")) == ["chunk"]
    assert explain("linear", 1, 67, num_heads=6, num_kv_heads=3).on_kernels
    with pytest.raises(ValueError, match=r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"):
        explain("linear", 1, 67, num_heads=4, num_kv_heads=3)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("linear", {"blind_spot": 4}, "a blind spot (4)"),
        ("linear", {"feature_map": "hedgehog"}, "the feature map Hedgehog, which is not one of the kernels'"),
        ("performer", {"epsilon": 0.5}, "an epsilon (0.5) added to the features"),
        ("local", {"window": 5, "xpos": 32}, "xpos"),
        ("local", {"window": 5, "query_offset": 2}, "query_offset"),
        ("local", {"window": 5, "bias": torch.zeros(4, 1, 9)}, "a bias"),
        ("local", {"window": 5, "head_dim": 257}, "head or value dimension (257, 257) is over 256"),
        ("local", {"window": 5, "dtype": "float64"}, "q, k and v are float64, float64, float64; the kernels take one"),
        ("linformer", {"rank": 11, "max_length": 67, "projection": "convolution"}, "a convolution"),
        (
            "linformer",
            {"rank": 11, "max_length": 67, "value_dim": 257},
            "head or value dimension (64, 257) is over 256",
        ),
        ("linformer", {"rank": 11, "max_length": 67, "dtype": "float64"}, "a tensor is not bfloat16, float16 or"),
        ("mixture", {"window": 5, "memory": "delta"}, "the memory DeltaAttention; the kernel takes LinearAttention"),
        ("mixture", {"window": 5, "head_dim": 129}, "a head of 129 × 129 in torch.float32; the kernel takes 128 × 128"),
        ("softmax", {}, "SoftmaxAttention has no kernel for it"),
    ],
)
def test_what_keeps_a_decode_step_from_kernels(name: str, options: dict[str, Any], why: str) -> None:
    found = explain(name, 1, 67, num_heads=4, decode=True, **options)
    (step,) = (decision for decision in found.decisions if decision.operation == "decode step")
    assert step.algorithm == "torch"
    assert (step.why or "").startswith(why)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"packed": [3], "padded": True}, "packed sequences are one row"),
        ({"decode": True, "training": True}, "a decode step is causal, of one token"),
        ({"packed": [3.5]}, "lengths must be one or more non-negative integers"),
        ({"packed": 3}, "lengths must be a sequence of integers, got 3"),
        ({"key_length": 0}, "key_length must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"device": "mps"}, "unknown device 'mps'; there is cpu, cuda"),
        ({"device": "gpu"}, "unknown device 'gpu'; there is cpu, cuda"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"windo": 5}, "windo"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        explain("local", **arguments)
    assert dispatch.recording is None


def model() -> LanguageModel:
    attention = AttentionConfig(
        num_heads=2, head_dim=8, mechanism=("linear", "linear", {"mechanism": "local", "window": 5}), rotary="none"
    )
    return LanguageModel(ModelConfig(dim=16, depth=3, causal=True, vocab_size=11, attention=attention))


def test_layers_of_a_model_are_explained_and_the_model_is_not_changed() -> None:
    given = model()
    before = {name: (x.clone(), x.device, x.dtype) for name, x in given.state_dict().items()}
    found = explain(given, 2, 67)
    assert [tuple(d.algorithm for d in each) for each in found.layers.values()] == [
        ("fused_chunk",),
        ("fused_chunk",),
        ("window",),
    ]
    lines = str(found).splitlines()
    assert lines[1].endswith("(2 layers)")
    assert "fused_chunk" in lines[2]
    assert lines[1].split(" … ")[0].strip() == next(iter(found.layers))
    assert given.training
    for name, x in given.state_dict().items():
        value, device, dtype = before[name]
        assert torch.equal(x, value)
        assert (x.device, x.dtype) == (device, dtype)
    assert {d.algorithm for d in explain(given, decode=True).decisions} == {"decode"}
    with pytest.raises(ValueError, match="the layer is causal: leave out causal, got False"):
        explain(given, causal=False)
    for name in ("window", "head_dim", "num_heads"):
        with pytest.raises(ValueError, match=f"options are for a mechanism given by name, got {name}"):
            explain(given, **{name: 5})
    with pytest.raises(ValueError, match="key_length is for cross-attention"):
        explain(given, key_length=5)
    with pytest.raises(ValueError, match="Linear has no attention layer"):
        explain(nn.Linear(2, 3))
    with pytest.raises(TypeError, match="target must be the name of a mechanism or a module, got None"):
        explain(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"qk_norm": True}, {"out_norm": True, "out_gate": "silu"}, {"conv_size": 3}], ids=str
)
@pytest.mark.parametrize("value_embedding", [False, True])
def test_layers_with_options_of_the_recipe(options: dict[str, Any], value_embedding: bool) -> None:
    attention = AttentionConfig(num_heads=2, mechanism="linear", value_embedding=value_embedding, **options)
    given = LanguageModel(ModelConfig(dim=16, depth=1, causal=True, vocab_size=11, attention=attention))
    before = ["convolution"] if "conv_size" in options else []
    layouts: list[dict[str, Any]] = [{}, {"training": True}, {"padded": True}]
    for layout in layouts:
        assert algorithms(explain(given, 2, 67, **layout)) == [*before, "fused_chunk"]
    packed = explain(given, packed=[3, 5])
    assert algorithms(packed) == ["fused_chunk"]
    assert packed.on_kernels == (not before)
    assert algorithms(explain(given, decode=True)) == ["decode"]


def test_a_decode_step_of_an_encoder_and_a_decoder() -> None:
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    encoder = ModelConfig(dim=16, depth=1, vocab_size=11, attention=attention)
    decoder = ModelConfig(dim=16, depth=1, causal=True, vocab_size=11, attention=attention, cross=attention)
    found = explain(longspan.EncoderDecoder(encoder, decoder), decode=True)
    assert [[decision.algorithm for decision in each] for each in found.layers.values()] == [["decode"], ["torch"]]
    assert all(name.startswith("decoder.") for name in found.layers)
    with pytest.raises(ValueError, match="bidirectional attention has no decode step: leave out decode"):
        explain(LanguageModel(encoder), decode=True)


def test_a_layer_of_linformer_is_one_kernel() -> None:
    config = AttentionConfig(
        num_heads=8, head_dim=64, mechanism={"mechanism": "linformer", "rank": 11, "max_length": 257}, rotary="none"
    )
    layer = longspan.Attention(64, config)
    assert algorithms(explain(layer, 1, 257)) == ["compressed"]
    assert explain(layer, 1, 67).decisions[0].why == "67 tokens; the kernels are not faster below 128"


def test_the_command_line_explains(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def info(*words: str) -> str:
        main(["info", *words])
        return capsys.readouterr().out

    assert info("--why", "--mechanisms=local", "--device=cuda", "--causal", "--length=67", "--batch=3") == (
        "local, causal: 3 × 67 tokens, bfloat16, on cuda:\n  windowed attention runs on Triton kernels (window)\n"
    )
    text = info("--why", "--mechanisms=linear", "--device=cuda", "--options", '{"blind_spot": 3}', "--heads=2")
    assert [line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")] == [
        "linear, causal",
        "linear, bidirectional",
        "linear, decode",
    ]
    assert "a blind spot (3)" in text
    assert "over 256" in info("--why", "--mechanisms=linear", "--device=cuda", "--head-dim=257", "--bidirectional")
    assert "in eager PyTorch: the tensors are on cpu" in info(
        "--why", "--mechanisms=linear", "--device=cpu", "--causal"
    )
    flags = ["--padded", "--training", "--dtype=float16", "--causal"]
    assert "float16, on cuda, training, padded" in info("--why", "--mechanisms=decay", "--device=cuda", *flags)
    assert "[3, 4]" in info("--why", "--mechanisms=linear", "--packed=3,4", "--device=cuda", "--causal")
    assert "decode step" in info("--why", "--mechanisms=linear", "--decode", "--device=cuda")
    longspan.save(model(), tmp_path / "model")
    shown = info(str(tmp_path / "model"), "--why", "--device=cuda", "--length=67")
    assert "(2 layers)" in shown
    assert "window" in shown
    assert "LanguageModel with" in info(str(tmp_path / "model"))
    for words, message in (
        (["--options=x"], "--options takes a JSON object"),
        (["--causal", "--decode"], "exclude each other"),
        (["--model=x", "--mechanisms=linear"], "are for mechanisms without a model"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["info", "--why", *words])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["info", "--head-dim=67"])
    assert "--head-dim describes a call for --why" in capsys.readouterr().err
