"""What calls cost the host: everything is called, ratios are to SDPA, results are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspan.bench import host
from longspan.bench.host import NOTHING, SDPA, HostOptions
from longspan.bench.subjects.base import Case, random_qkv


def test_results(tmp_path: Path) -> None:
    sizes = {"lengths": (5, 7), "batch": 1, "heads": 2, "head_dim": 8}
    rows = host.run(HostOptions(**sizes, device="cpu", turns=2, calls=1, out=tmp_path / "new" / "host.json"))
    written = json.loads((tmp_path / "new" / "host.json").read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert written["options"]["lengths"] == [5, 7]
    assert [row["case"]["length"] for row in rows] == [5] * 5 + [7] * 5
    names = [row["name"] for row in rows[:5]]
    assert names == ["linear", "performer, 256 features", "local, 256 keys", SDPA, NOTHING]
    reference = rows[3]
    assert set(reference["ratios"].values()) == {1}
    keys = {f"host_{name}_us" for name in ("forward", "no_grad", "forward_backward", "forward_backward_one_thread")}
    for row in rows[:5]:
        assert set(row["ratios"]) == keys | {"forward_ms", "forward_backward_ms"}
        assert row["ratios"]["host_forward_us"] == row["host_forward_us"] / reference["host_forward_us"]
        assert 0 < row["host_forward_us"] <= 1000 * row["forward_ms"] + 0.1


def test_all_are_causal_attention() -> None:
    """Except the function that only allocates."""
    case = Case(7, num_heads=2, head_dim=8, dtype="bfloat16")
    q, k, v = random_qkv(case)
    later = [torch.cat([x[:, :5], x[:, 5:] + 1], 1) for x in (k, v)]
    for name, (_, attend) in host.subjects(case).items():
        out = attend(q, k, v)
        assert out.shape == v.shape
        if name != NOTHING:
            assert torch.equal(attend(q, *later)[:, :5], out[:, :5])
            assert not torch.equal(attend(q, *later), out)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        host.run(HostOptions(device="tpu", out=tmp_path / "host.json"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA device; use device cpu"):
            host.run(HostOptions(out=tmp_path / "host.json"))
    assert not (tmp_path / "host.json").exists()
