"""Peers: layers and models of other packages, kernels that need CUDA, and the dtype of accuracy checks."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.bench.subjects import gated, layers, peers
from longspan.bench.subjects.base import Case
from longspan.bench.subjects.layers import LayerSubject, PeerLayerSubject, layer_subjects, layer_workload
from longspan.bench.subjects.mechanisms import TOLERANCES, MechanismSubject, PeerSubject
from longspan.bench.subjects.models import PeerTrainSubject
from longspan.bench.subjects.peers import LAYER_PEERS, MODEL_PEERS
from longspan.cli import main
from longspan.ops.gated import gated_linear

TINY = Case(64, num_heads=2, head_dim=8)
SIZES = ["--lengths=64", "--heads=2", "--head-dim=8", "--rounds=1", "--repeats=2", "--threads=1"]


def bench(out: Path, *arguments: str) -> None:
    main(["bench", *arguments, *SIZES, "--out", str(out)])


def test_layers_beside_ours(tmp_path: Path, in_process: None, capfd: Any) -> None:
    out = tmp_path / "layers.json"
    bench(out, "layers", "--mechanisms=linformer", "--bidirectional")
    rows = json.loads(out.read_text())["rows"]
    names = [name for name, layer in LAYER_PEERS.items() if layer.mechanism == "linformer"]
    assert [row["name"] for row in rows] == [text for name in names for text in (f"longspan for {name}", name)]
    for mine, other in zip(rows[::2], rows[1::2], strict=True):
        assert (mine["status"], other["ratio_to"]) == ("ok", mine["name"])
        assert mine["ratios"]["forward_backward_ms"] == 1
        assert mine["runs"][0]["check"]["reference"] == "itself in float64"
        if other["status"] != "not installed":
            assert other["status"] == "ok", other["message"]
            assert other["ratios"]["forward_ms"] == other["forward_ms"] / mine["forward_ms"]
            assert other["runs"][0]["check"]["reference"] == "longspan with its weights in float64"
    assert "ratio" in capfd.readouterr().out


def test_layers_without_peers_and_of_all_mechanisms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def fake(*arguments: Any) -> list[Any]:
        asked.append(arguments)
        return []

    monkeypatch.setattr("longspan.bench.options.layer_subjects", fake)
    bench(tmp_path / "layers.json", "layers", "--no-peers", "--compile=default", "--autocast")
    assert asked == [(name, "default", True, False) for name in ("linear", "performer", "local", "linformer")]
    alone, both = (layer_subjects("local", "default", True, with_peers)[0] for with_peers in (False, True))
    assert [(subject.package, subject.compile, subject.autocast) for subject in alone] == [
        ("longspan", "default", True)
    ]
    assert [(each.package, each.autocast) for each in both] == [("longspan", True), ("local-attention", True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LAYER_PEERS)
def test_a_peer_layer_computes_what_longspan_does(name: str, causal: bool) -> None:
    case = replace(TINY, causal=causal)
    for subject in (LayerSubject("ours", name), PeerLayerSubject("theirs", name)):
        unavailable = subject.unavailable(case)
        if unavailable is not None:
            assert unavailable[0] == ("not supported" if causal and LAYER_PEERS[name].not_causal else "not installed")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own
            check = subject.check(case)
        assert check.error <= check.tolerance == TOLERANCES["float32"]


def test_a_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "linformer, k 256, one shared head"
    if PeerLayerSubject("theirs", name).unavailable(replace(TINY, causal=False)) is not None:
        pytest.skip("linformer is not installed")
    real = layers._results

    def louder(layer: nn.Module, x: Tensor, d: Tensor) -> list[Tensor]:
        return real(layer, x, d) if x.dtype == torch.float64 else [1.01 * y for y in real(layer, x, d)]

    monkeypatch.setattr(layers, "_results", louder)
    check = PeerLayerSubject("theirs", name).check(replace(TINY, causal=False))
    assert check.error > check.tolerance


@pytest.mark.parametrize("name", [name for name, peer in MODEL_PEERS.items() if peer.replaced])
def test_a_peer_model_computes_what_longspan_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = PeerTrainSubject(name), Case(64)
    unavailable = subject.unavailable(case)
    if unavailable is not None:
        pytest.skip(unavailable[1])
    real = peers.ModelPeer.logits

    def louder(peer: peers.ModelPeer, tokens: Tensor) -> Tensor:
        factor = 1.0 if next(peer.net.parameters()).dtype == torch.float64 else 1.01
        return factor * real(peer, tokens)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        check = subject.check(case)
        assert check is not None
        assert check.error <= check.tolerance == TOLERANCES["float32"]
        monkeypatch.setattr(peers.ModelPeer, "logits", louder)
        check = subject.check(case)
    assert check is not None
    assert check.error > check.tolerance


class Seen(nn.Module):
    """A linear layer that records the dtypes of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.seen = nn.Linear(TINY.dim, TINY.dim), []

    def forward(self, x: Tensor) -> Tensor:
        out = self.map(x)
        self.seen.append((x.dtype, self.map.weight.dtype, out.dtype))
        return out


def test_half_precision_of_parameters_or_by_autocast() -> None:
    half, full = torch.bfloat16, torch.float32
    for autocast, wanted in ((False, (half, half, half)), (True, (full, full, half))):
        layer = Seen()
        work = layer_workload(replace(TINY, dtype="bfloat16"), layer, autocast)
        out, d_x, *_ = work.steps["forward_backward"].call()
        assert layer.seen == [wanted]
        assert (out.dtype, d_x.dtype) == (half, wanted[0])


def test_compile_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda layer, mode: compiled.append(mode) or layer)
    case = replace(TINY, causal=False)
    for option in ("off", "reduce-overhead"):
        LayerSubject("ours", "linformer, k 256, one shared head", option).workload(case).steps["forward"].run()
    assert compiled == ["reduce-overhead"]


@pytest.mark.parametrize(
    "subject", [MechanismSubject("softmax", "softmax"), LayerSubject("ours", "local-attention, 257 keys")]
)
def test_the_check_is_of_the_dtype_that_is_measured(subject: Any) -> None:
    for dtype, at_least in (("float64", 0), ("float32", 1e-9), ("bfloat16", 1e-4), ("float16", 1e-5)):
        check = subject.check(replace(TINY, dtype=dtype))
        assert check.tolerance == TOLERANCES[dtype]
        assert at_least <= check.error <= check.tolerance


@pytest.mark.filterwarnings("ignore")  # FlexAttention's own, where it is not compiled
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_sees_the_window(causal: bool) -> None:
    subject, case = PeerSubject("FlexAttention, 257 keys"), Case(64, causal=causal)
    assert subject.unavailable(case) == (
        "not supported",
        "FlexAttention's kernels need CUDA; elsewhere it computes all n² scores",
    )
    assert subject.unavailable(replace(case, device="cuda")) is None
    check = subject.check(case)
    assert check.error <= check.tolerance


def test_flash_linear_attention_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = PeerSubject("flash-linear-attention, softmax map")
    assert subject.unavailable(TINY) == ("not supported", "flash-linear-attention has no CPU path")
    monkeypatch.setattr(peers, "installed_version", lambda package: None)
    message = "flash-linear-attention is not installed: pip install flash-linear-attention"
    assert subject.unavailable(replace(TINY, device="cuda")) == ("not installed", message)


@pytest.mark.parametrize("name", gated.VARIANTS)
def test_gated_memories_beside_their_peers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, calls = gated.VARIANTS[name], []
    (ours, peer) = next(c for c in gated.gated_subjects(variant.mechanism, TINY, True) if c[0].name == name)
    check = ours.check(TINY)
    assert 0 < check.error <= check.tolerance == TOLERANCES["float32"]
    assert set(ours.workload(TINY).steps) == {"forward", "forward_backward"}
    gates = {"decay": 4, "delta": 5}[variant.mechanism] - (variant.gate == "none")
    assert len(ours.workload(TINY).heaviest.run()) == 1 + gates

    def function(q: Any, k: Any, v: Any, scale: float, g: Any = None, beta: Any = None) -> Any:
        calls.append((None if g is None else g.ndim, None if beta is None else beta.dtype))
        log_decay = g[..., None] if variant.gate == "head" else g
        beta = None if beta is None else beta.float()
        return gated_linear(q, k, v, log_decay=log_decay, beta=beta, delta=variant.mechanism == "delta", scale=scale)

    module, attribute = variant.peer
    monkeypatch.setattr(gated, "import_module", {f"fla.ops.{module}": SimpleNamespace(**{attribute: function})}.get)
    assert peer.package == "flash-linear-attention"
    assert peer.unavailable(TINY) == ("not supported", "flash-linear-attention has no CPU path")
    check = peer.check(TINY)
    assert 0 < check.error <= check.tolerance == TOLERANCES["bfloat16"]
    half = torch.bfloat16 if variant.mechanism == "delta" else None
    assert calls == [({"none": None, "head": 3, "channel": 4}[variant.gate], half)]
