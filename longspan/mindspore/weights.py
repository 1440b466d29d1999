"""Weights between MindSpore and PyTorch, in safetensors, with the names each side gives them.

    python -m longspan.mindspore.weights SOURCE TARGET --to mindspore
    python -m longspan.mindspore.weights SOURCE TARGET --to torch [--dim-head 64]

MindSpore calls a layer norm's weights gamma and beta and an embedding's embedding_table; the rest has the same names
and shapes on both sides. PyTorch's checkpoints also hold the rotary frequencies, which are constants here.
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
    """Fills a cell with the weights of the PyTorch module of the same name and options, from a safetensors file."""
    found, own = from_torch(_read(path)), cell.parameters_dict()
    missing, spare = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    if missing or spare:
        raise ValueError(
            f"{path} does not fit: it lacks {missing[:4]} ({len(missing)} in all) and has {spare[:4]} ({len(spare)}) "
            "that the cell does not; give the cell the options the weights were trained with "
            "(num_residual_streams=1 for weights from before there were streams)"
        )
    wrong = [
        f"{name} {found[name].shape}, not {own[name].shape}" for name in own if found[name].shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"{path} does not fit: {'; '.join(wrong[:4])}; give the cell the sizes it was trained with")
    for name, weight in own.items():
        weight.set_data(found[name].astype(weight.dtype))


def save_torch(cell: nn.Cell, path: str | Path) -> None:
    """Writes a cell's weights as the PyTorch module of the same name and options has them, to a safetensors file."""
    frequencies = {f"{name}.inv_freq": sub.inv_freq for name, sub in cell.cells_and_names() if isinstance(sub, Rotary)}
    _write({**to_torch(dict(cell.parameters_dict())), **frequencies}, path)


def from_torch(weights: Mapping[str, Tensor]) -> Weights:
    """PyTorch's names -> MindSpore's. Names without residual streams, from before there were any, are accepted."""
    found = {}
    for name, value in weights.items():
        stem, _, last = name.rpartition(".")
        if last == "inv_freq":
            continue
        # A layer norm's weight is a vector and has a bias; a linear layer's is a matrix.
        if f"{stem}.bias" in weights and weights[f"{stem}.weight"].ndim == 1:
            last = {"weight": "gamma", "bias": "beta"}[last]
        elif stem.rpartition(".")[2] in EMBEDDINGS:
            last = "embedding_table"
        found[f"{stem}.{last}" if stem else last] = value
    if not any(".branch." in name for name in found):
        found = {re.sub(r"^(layers\.\d+\.\d+\.)", r"\1branch.", name): value for name, value in found.items()}
    return found


def to_torch(weights: Mapping[str, Tensor], dim_head: int | None = None) -> Weights:
    """MindSpore's names -> PyTorch's. dim_head: of a model with rotary positions, to add their frequencies."""
    found = {}
    for name, value in weights.items():
        stem, _, last = name.rpartition(".")
        # The residual streams' norms have a gamma too, in both frameworks, and no beta.
        if last == "beta" or (last == "gamma" and f"{stem}.beta" in weights):
            last = {"gamma": "weight", "beta": "bias"}[last]
        elif last == "embedding_table":
            last = "weight"
        found[f"{stem}.{last}" if stem else last] = value
        if last == "weight" and dim_head is not None and stem.rpartition(".")[2] == "to_qkv":
            found[name.replace("to_qkv.weight", FREQUENCIES)] = Rotary(dim_head).inv_freq
    return found


def main() -> None:
    """Rewrites a safetensors file with the other framework's names."""
    parser = argparse.ArgumentParser(prog="python -m longspan.mindspore.weights", description=main.__doc__)
    parser.add_argument("source", type=Path, help="a safetensors file")
    parser.add_argument("target", type=Path, help="the safetensors file to write")
    parser.add_argument("--to", choices=["torch", "mindspore"], required=True, help="whose names the target has")
    parser.add_argument(
        "--dim-head", type=int, help="to torch: also write the rotary frequencies for heads of this size"
    )
    given = parser.parse_args()
    if given.dim_head is not None and given.to == "mindspore":
        parser.error("--dim-head goes with --to torch: MindSpore's side has no frequencies to write")
    if not given.source.is_file():
        parser.error(f"there is no file {given.source}")
    weights = _read(given.source)
    _write(to_torch(weights, given.dim_head) if given.to == "torch" else from_torch(weights), given.target)
    print(f"{given.target}: {len(weights)} tensors with {given.to}'s names")


def _read(path: str | Path) -> Weights:
    return {name: Tensor(value) for name, value in ms.load_checkpoint(str(path), format="safetensors").items()}


def _write(weights: Mapping[str, Tensor], path: str | Path) -> None:
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"the file must end in .safetensors, got {path}")
    data = [{"name": name, "data": Tensor(value)} for name, value in weights.items()]
    ms.save_checkpoint(data, str(path), format="safetensors")
    Path(path).chmod(0o644)  # MindSpore leaves it readable by its owner alone.


if __name__ == "__main__":
    main()
