"""Weights under the other framework's names; that PyTorch loads them is test_parity.py's and torch_side.py's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import load_file, save_file

from longspan.mindspore import LocalTransformer
from longspan.mindspore.weights import from_torch, load_torch, save_torch, to_torch

MODEL = {"num_tokens": 19, "dim": 20, "depth": 2, "max_seq_len": 31, "local_attn_window_size": 5}
MODEL |= {"dim_head": 6, "heads": 3, "qk_rmsnorm": True, "gate_values_per_head": True}
NAMES = {
    "token_emb.embedding_table": "token_emb.weight",
    "pos_emb.embedding_table": "pos_emb.weight",
    "layers.0.0.norm.gamma": "layers.0.0.norm.gamma",
    "layers.0.0.branch.norm.gamma": "layers.0.0.branch.norm.weight",
    "layers.0.0.branch.norm.beta": "layers.0.0.branch.norm.bias",
    "layers.0.0.branch.to_qkv.weight": "layers.0.0.branch.to_qkv.weight",
    "layers.0.0.branch.to_v_gate.0.bias": "layers.0.0.branch.to_v_gate.0.bias",
    "layers.1.1.branch.0.gamma": "layers.1.1.branch.0.weight",
    "to_logits.0.beta": "to_logits.0.bias",
    "to_logits.1.weight": "to_logits.1.weight",
}


def arrays(model: LocalTransformer) -> dict[str, np.ndarray]:
    return {name: weight.asnumpy() for name, weight in model.parameters_dict().items()}


def test_names_both_ways() -> None:
    weights = dict(LocalTransformer(**MODEL).parameters_dict())
    theirs = to_torch(weights)
    for ours, name in NAMES.items():
        assert theirs[name] is weights[ours]
    back = from_torch(theirs)
    assert list(back) == list(weights)
    assert all(back[name] is weights[name] for name in weights)


def test_files_both_ways(tmp_path: Path) -> None:
    one, two = LocalTransformer(**MODEL), LocalTransformer(**MODEL)
    save_torch(one, tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")
    np.testing.assert_allclose(found["layers.0.0.branch.attn_fn.rel_pos.inv_freq"], 10000 ** (-np.arange(3) / 3), 1e-6)
    load_torch(two, tmp_path / "one.safetensors")
    before, after = arrays(one), arrays(two)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_tool_does_the_same(tmp_path: Path) -> None:
    model = LocalTransformer(**MODEL)
    save_torch(model, tmp_path / "torch.safetensors")

    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "longspan.mindspore.weights", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = tool("torch.safetensors", "ours.safetensors", "--to", "mindspore")
    assert done.returncode == 0, done.stderr
    ours = load_file(tmp_path / "ours.safetensors")
    weights = arrays(model)
    assert set(ours) == set(weights)
    assert all(np.array_equal(ours[name], weights[name]) for name in weights)
    assert tool("ours.safetensors", "back.safetensors", "--to", "torch", "--dim-head", "6").returncode == 0
    there, back = load_file(tmp_path / "torch.safetensors"), load_file(tmp_path / "back.safetensors")
    assert set(there) == set(back)
    assert all(np.array_equal(there[name], back[name]) for name in there)
    refused = tool("nothing.safetensors", "x.safetensors", "--to", "torch")
    assert refused.returncode == 2
    assert "file not found: nothing.safetensors" in refused.stderr


def test_names_from_before_there_were_streams(tmp_path: Path) -> None:
    model = LocalTransformer(**MODEL, num_residual_streams=1)
    save_torch(model, tmp_path / "now.safetensors")
    old = {name.replace(".branch.", "."): value for name, value in load_file(tmp_path / "now.safetensors").items()}
    assert "layers.0.0.to_qkv.weight" in old
    save_file(old, tmp_path / "old.safetensors")
    other = LocalTransformer(**MODEL, num_residual_streams=1)
    load_torch(other, tmp_path / "old.safetensors")
    x = Tensor(np.arange(13)[None])
    np.testing.assert_array_equal(model(x).asnumpy(), other(x).asnumpy())
    with pytest.raises(ValueError, match="num_residual_streams=1 for weights of releases without residual streams"):
        load_torch(LocalTransformer(**MODEL), tmp_path / "old.safetensors")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    save_torch(LocalTransformer(**MODEL), tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"missing \(.*layers\.2"):
        load_torch(LocalTransformer(**{**MODEL, "depth": 3}), tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"pos_emb.embedding_table \(31, 20\), not \(37, 20\)"):
        load_torch(LocalTransformer(**{**MODEL, "max_seq_len": 37}), tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_torch(LocalTransformer(**MODEL), tmp_path / "one.ckpt")
