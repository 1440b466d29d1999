"""Convert weights between MindSpore and PyTorch, in safetensors files.

    python -m longspan.mindspore.weights SOURCE TARGET --to mindspore
    python -m longspan.mindspore.weights SOURCE TARGET --to torch [--dim-head 64]

MindSpore names the parameters of a layer norm gamma and beta, and that of an embedding embedding_table; other names and
all shapes are the same. PyTorch checkpoints also contain the rotary frequencies, which are constants in MindSpore.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn

from longspan.mindspore.rotary import Rotary

Weights = dict[str, Tensor]
EMBEDDINGS = ("token_emb", "pos_emb")
FREQUENCIES = "attn_fn.rel_pos.inv_freq"


def load_torch(cell: nn.Cell, path: str | Path) -> None:
    """Load a safetensors file of the PyTorch module with the same name and options into a cell."""
    found, own = from_torch(_read(path)), cell.parameters_dict()
    missing, spare = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    if missing or spare:
        raise ValueError(
            f"{path} does not fit the cell: {len(missing)} weights are missing ({missing[:4]}, …) and {len(spare)} are "
            f"unexpected ({spare[:4]}, …); build the cell with the options the weights were trained with "
            "(num_residual_streams=1 for weights of releases without residual streams)"
        )
    wrong = [
        f"{name} {found[name].shape}, not {own[name].shape}" for name in own if found[name].shape != own[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{path} does not fit the cell: {'; '.join(wrong[:4])}; build the cell with the sizes of the weights"
        )
    for name, weight in own.items():
        weight.set_data(found[name].astype(weight.dtype))


def save_torch(cell: nn.Cell, path: str | Path) -> None:
    """Save a cell's weights as a safetensors file for the PyTorch module with the same name and options."""
    frequencies = {f"{name}.inv_freq": sub.inv_freq for name, sub in cell.cells_and_names() if isinstance(sub, Rotary)}
    _write({**to_torch(dict(cell.parameters_dict())), **frequencies}, path)


def from_torch(weights: Mapping[str, Tensor]) -> Weights:
    """Convert PyTorch names to MindSpore names, including those of releases without residual streams."""
    found = {}
    for name, value in weights.items():
        stem, _, last = name.rpartition(".")
        if last == "inv_freq":
            continue
        # The weight of a layer norm is a vector, that of a linear layer a matrix.
        if f"{stem}.bias" in weights and weights[f"{stem}.weight"].ndim == 1:
            last = {"weight": "gamma", "bias": "beta"}[last]
        elif stem.rpartition(".")[2] in EMBEDDINGS:
            last = "embedding_table"
        found[f"{stem}.{last}" if stem else last] = value
    if not any(".branch." in name for name in found):
        found = {re.sub(r"^(layers\.\d+\.\d+\.)", r"\1branch.", name): value for name, value in found.items()}
    return found


def to_torch(weights: Mapping[str, Tensor], dim_head: int | None = None) -> Weights:
    """Convert MindSpore names to PyTorch names. dim_head: Add the rotary frequencies for heads of this width."""
    found = {}
    for name, value in weights.items():
        stem, _, last = name.rpartition(".")
        # Norms of residual streams have a gamma, but no beta, in both frameworks.
        if last == "beta" or (last == "gamma" and f"{stem}.beta" in weights):
            last = {"gamma": "weight", "beta": "bias"}[last]
        elif last == "embedding_table":
            last = "weight"
        found[f"{stem}.{last}" if stem else last] = value
        if last == "weight" and dim_head is not None and stem.rpartition(".")[2] == "to_qkv":
            found[name.replace("to_qkv.weight", FREQUENCIES)] = Rotary(dim_head).inv_freq
    return found


def main() -> None:
    """Convert a safetensors file to the names of the other framework."""
    parser = argparse.ArgumentParser(prog="python -m longspan.mindspore.weights", description=main.__doc__)
    parser.add_argument("source", type=Path, help="the safetensors file to read")
    parser.add_argument("target", type=Path, help="the safetensors file to write")
    parser.add_argument("--to", choices=["torch", "mindspore"], required=True, help="the framework of the target")
    parser.add_argument(
        "--dim-head", type=int, help="with --to torch: add the rotary frequencies for heads of this width"
    )
    given = parser.parse_args()
    if given.dim_head is not None and given.to == "mindspore":
        parser.error("--dim-head needs --to torch: MindSpore checkpoints contain no frequencies")
    if not given.source.is_file():
        parser.error(f"file not found: {given.source}")
    weights = _read(given.source)
    _write(to_torch(weights, given.dim_head) if given.to == "torch" else from_torch(weights), given.target)
    print(f"{given.target}: {len(weights)} tensors with names of {given.to}")


def _read(path: str | Path) -> Weights:
    return {name: Tensor(value) for name, value in ms.load_checkpoint(str(path), format="safetensors").items()}


def _write(weights: Mapping[str, Tensor], path: str | Path) -> None:
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"the file name must end in .safetensors, got {path}")
    data = [{"name": name, "data": Tensor(value)} for name, value in weights.items()]
    ms.save_checkpoint(data, str(path), format="safetensors")
    Path(path).chmod(0o644)  # MindSpore makes it readable by the owner only


if __name__ == "__main__":
    main()
