"""What `longspan bench` sets beside ours: layers of the older packages, kernels that need CUDA, and in which dtype it
checks.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.bench import Case, Ours, Theirs
from longspan.bench.subjects import layers as layering
from longspan.bench.subjects import models as modeling
from longspan.bench.subjects import peers as peering
from longspan.bench.subjects.layers import LAYERS, OurLayer, TheirLayer, layer_work, layers
from longspan.bench.subjects.mechanisms import TOLERANCES
from longspan.bench.subjects.models import OLDER, TheirModel
from longspan.cli.bench import main

TINY = Case(64, num_heads=2, head_dim=8)
SIZES = ["--lengths=64", "--heads=2", "--head-dim=8", "--rounds=1", "--repeats=2", "--threads=1"]


def bench(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["longspan.bench", *arguments, *SIZES, "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code


def test_layers_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    out = tmp_path / "layers.json"
    bench(monkeypatch, out, "layers", "--mechanisms=linformer", "--bidirectional")
    rows = json.loads(out.read_text())["rows"]
    names = [name for name, layer in LAYERS.items() if layer.mechanism == "linformer"]
    assert [row["name"] for row in rows] == [text for name in names for text in (f"longspan for {name}", name)]
    for mine, other in zip(rows[::2], rows[1::2], strict=True):
        assert (mine["status"], other["ratio_to"]) == ("ok", mine["name"])
        assert mine["ratios"]["forward_backward_ms"] == 1
        assert mine["runs"][0]["check"]["against"] == "itself in float64"
        if other["status"] != "not installed":
            assert other["status"] == "ok", other["message"]
            assert other["ratios"]["forward_ms"] == other["forward_ms"] / mine["forward_ms"]
            assert other["runs"][0]["check"]["against"] == "ours with its weights in float64"
    assert "÷ ours" in capfd.readouterr().out


def test_layers_without_peers_and_of_all_mechanisms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool, bool]] = []

    def fake(*given: Any) -> list[Any]:
        asked.append(given)
        return []

    monkeypatch.setattr("longspan.cli.bench.layers", fake)
    bench(monkeypatch, tmp_path / "layers.json", "layers", "--no-peers", "--compile")
    assert asked == [(name, True, False) for name in ("linear", "performer", "local", "linformer")]
    ours, theirs = (layers("local", True, with_peers)[0] for with_peers in (False, True))
    assert [(subject.package, subject.compiled) for subject in ours] == [("longspan", True)]
    assert [subject.package for subject in theirs] == ["longspan", "local-attention"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_ours_does(name: str, causal: bool) -> None:
    case = replace(TINY, causal=causal)
    for subject in (OurLayer("ours", name), TheirLayer("theirs", name)):
        unfit = subject.unfit(case)
        if unfit is not None:
            assert unfit[0] == ("not supported" if causal and LAYERS[name].not_causal else "not installed")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own
            check = subject.check(case)
        assert check.error <= check.tolerance == TOLERANCES["float32"]


def test_a_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "linformer, k 256, one shared head"
    if TheirLayer("theirs", name).unfit(replace(TINY, causal=False)) is not None:
        pytest.skip("linformer is not installed")
    real = layering._results

    def louder(layer: nn.Module, x: Tensor, d: Tensor) -> list[Tensor]:
        return real(layer, x, d) if x.dtype == torch.float64 else [1.01 * y for y in real(layer, x, d)]

    monkeypatch.setattr(layering, "_results", louder)
    check = TheirLayer("theirs", name).check(replace(TINY, causal=False))
    assert check.error > check.tolerance


@pytest.mark.parametrize("name", [name for name, older in OLDER.items() if older.replaced])
def test_an_older_model_computes_what_ours_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = TheirModel(name, "train"), Case(64)
    unfit = subject.unfit(case)
    if unfit is not None:
        pytest.skip(unfit[1])
    real = modeling._inner

    def louder(net: nn.Module) -> Any:
        factor = 1.0 if next(net.parameters()).dtype == torch.float64 else 1.01
        return lambda tokens: factor * real(net)(tokens)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        check = subject.check(case)
        assert check is not None
        assert check.error <= check.tolerance == TOLERANCES["float32"]
        monkeypatch.setattr(modeling, "_inner", louder)
        check = subject.check(case)
    assert check is not None
    assert check.error > check.tolerance


class Seen(nn.Module):
    """A linear layer that remembers in which dtypes it was called."""

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
        work = layer_work(replace(TINY, dtype="bfloat16"), layer, autocast)
        out, d_x, *_ = work["forward_backward"].call()
        assert layer.seen == [wanted]
        assert (out.dtype, d_x.dtype) == (half, wanted[0])


def test_compile_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda layer: compiled.append(layer) or layer)
    case = replace(TINY, causal=False)
    for option in (False, True):
        OurLayer("ours", "linformer, k 256, one shared head", option).work(case)["forward"].call()
    assert len(compiled) == 1


@pytest.mark.parametrize("subject", [Ours("softmax", "softmax"), OurLayer("ours", "local-attention, 257 keys")])
def test_the_check_is_of_the_dtype_that_is_measured(subject: Any) -> None:
    for dtype, at_least in (("float64", 0), ("float32", 1e-9), ("bfloat16", 1e-4), ("float16", 1e-5)):
        check = subject.check(replace(TINY, dtype=dtype))
        assert check.tolerance == TOLERANCES[dtype]
        assert at_least <= check.error <= check.tolerance


@pytest.mark.filterwarnings("ignore")  # FlexAttention's own, where it is not compiled
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_sees_the_window(causal: bool) -> None:
    subject, case = Theirs("FlexAttention, 257 keys"), Case(64, causal=causal)
    assert subject.unfit(case) == (
        "not supported",
        "FlexAttention's kernels are for CUDA; elsewhere it makes all n² scores",
    )
    assert subject.unfit(replace(case, device="cuda")) is None
    check = subject.check(case)
    assert check.error <= check.tolerance


def test_flash_linear_attention_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Theirs("flash-linear-attention, softmax map")
    assert subject.unfit(TINY) == ("not supported", "flash-linear-attention has no CPU path")
    monkeypatch.setattr(peering, "installed_version", lambda package: None)
    message = "flash-linear-attention is not installed: pip install flash-linear-attention"
    assert subject.unfit(replace(TINY, device="cuda")) == ("not installed", message)
