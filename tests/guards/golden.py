"""The golden file: how results are reduced, stored and compared.

Every tensor has a digest of its raw bytes, for exact comparison on one machine, and values for comparison on any.
Small tensors and outputs are stored whole; others as two fixed projections and their largest magnitude.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from cases import Result, seeded
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent
VALUES, INDEX = FOLDER / "golden.safetensors", FOLDER / "golden.json"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
_WHOLE, _WHOLE_OUTPUT = 8, 500
_DTYPES = {torch.float64: "d", torch.float32: "f", torch.int64: "l"}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:12]


def entry(tensor: Tensor) -> str:
    """Digest, shape and dtype of a tensor in one line."""
    shape = "x".join(map(str, tensor.shape))
    return f"{digest(tensor)} {shape} {_DTYPES.get(tensor.dtype, str(tensor.dtype))}"


def reduced(name: str, tensor: Tensor) -> Tensor:
    """What is stored of a tensor: float64 (n,)."""
    flat = tensor.detach().double().flatten()
    output = name in ("causal.out", "plain.logits", "plain.out") and tensor.dtype == torch.float64
    if flat.numel() <= (_WHOLE_OUTPUT if output else _WHOLE):
        return flat
    signs = torch.randint(0, 2, (2, flat.numel()), generator=seeded(f"signs {flat.numel()}")) * 2.0 - 1
    finite = flat.where(flat.isfinite(), 0.0)
    return torch.cat([signs.double() @ finite / flat.numel() ** 0.5, finite.abs().amax()[None]])


def stored(result: Result) -> tuple[Tensor, dict[str, Any]]:
    """The values and the index of one case."""
    tensors = result.tensors
    pieces = [reduced(name, x) for name, x in tensors.items()]
    values = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)
    narrow = all(x.dtype != torch.float64 for x in tensors.values())
    index = {"facts": result.facts, "tensors": {name: entry(x) for name, x in tensors.items()}}
    return values.float() if narrow else values, json.loads(json.dumps(index))


def write(results: dict[str, Result]) -> None:
    values, index = {}, {}
    for case, result in results.items():
        values[case], index[case] = stored(result)
    save_file(values, VALUES)
    lines = (f"{json.dumps(case)}: {json.dumps(held, separators=(',', ':'))}" for case, held in index.items())
    INDEX.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read() -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(VALUES), json.loads(INDEX.read_text())


def changed_bits(result: Result, index: dict[str, Any]) -> list[str]:
    """Names of everything that is not bit for bit as it was."""
    now = stored(result)[1]
    wrong = [name for name in {**index["facts"], **now["facts"]} if index["facts"].get(name) != now["facts"].get(name)]
    before, after = index["tensors"], now["tensors"]
    return wrong + [name for name in {**before, **after} if before.get(name) != after.get(name)]


def differences(result: Result, values: Tensor, index: dict[str, Any], slack: float = 1) -> list[str]:
    """What differs by more than the tolerance of its dtype, relative to the largest value of its tensor.

    slack: multiplies tolerances.
    """
    now = json.loads(json.dumps(result.facts))
    wrong = [f"{name} differs" for name in {**index["facts"], **now} if index["facts"].get(name) != now.get(name)]
    if sorted(result.tensors) != sorted(index["tensors"]):
        return [*wrong, f"other tensors: {sorted(set(result.tensors) ^ set(index['tensors']))}"]
    offset = 0
    scales = {
        name: float(x.detach().double().abs().nan_to_num(0, 0).amax())
        for name, x in result.tensors.items()
        if x.numel()
    }
    for name, line in index["tensors"].items():
        tensor, start = result.tensors[name], offset
        got = reduced(name, tensor)
        offset += len(got)
        if line.split(" ", 1)[1] != entry(tensor).split(" ", 1)[1]:
            wrong.append(f"{name}: was {line}, is {entry(tensor)}")
            continue
        want = values[start:offset].double()
        # Gradients that vanish but for rounding have no scale of their own: they are held to that of their case.
        mode = name.split(".", 1)[0]
        around = max((s for other, s in scales.items() if other.startswith(f"{mode}.")), default=0.0)
        scale = max(scales.get(name, 0.0), 1e-3 * around if ".grad." in name else 0.0)
        tolerance = slack * TOLERANCE.get(str(tensor.dtype).removeprefix("torch."), 0.0)
        same = (got == want) | ((got - want).abs() <= tolerance * scale)
        if not same.all():
            wrong.append(f"{name}: {float((got - want).abs().max()):.2e} apart on a scale of {scale:.2e}")
    return wrong
