"""A run's checkpoint: everything that makes the next step, in one folder that is replaced as a whole or not at all.

checkpoint/model.safetensors and config.json are the model, as `longspan.load` opens it; training.pt beside them holds
the optimizer, the data position, random states and carried memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from longspan.generation.session import fill_state, state_values
from longspan.generation.tokenization import TOKENIZER
from longspan.models.checkpoint import CONFIG, TENSORS, Model, load, replacing, settled, write
from longspan.models.config import ModelConfig
from longspan.models.residual import StackState
from longspan.train.config import FREE, differences
from longspan.train.presets import Values

FOLDER, TRAINING = "checkpoint", "training.pt"
NAMES = (TENSORS, CONFIG, TRAINING, TOKENIZER)


def save_run(run: Path, model: Model, training: Values, tokenizer: Path | None) -> None:
    """Writes a checkpoint; if it cannot, the one before stays and OSError says why."""
    with replacing(run / FOLDER, NAMES) as partial:
        write(model, partial)
        torch.save(training, partial / TRAINING)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / TOKENIZER)


def read_run(run: Path) -> tuple[Model, Values] | None:
    """The model and the rest of the last checkpoint; None if the run has none."""
    try:
        folder = settled((run / FOLDER).resolve())
    except FileNotFoundError:
        return None
    # Only numbers, names and tensors: nothing in the file is executed.
    training = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
    if "optimiser" in training:  # written before version 0.2
        training["optimizer"] = training.pop("optimiser")
        settings = training["about"]["settings"]
        settings["model"] = json.loads(json.dumps(ModelConfig.from_dict(settings["model"]).to_dict()))
    return load(run / FOLDER), training


def check_same(run: Path, before: Values, now: Values) -> None:
    """Refuses to go on with a run that was something else."""
    found = differences(before, now)
    changed = {name: pair for name, pair in found.items() if name.removeprefix("train.") not in FREE}
    if changed:
        first = ", ".join(f"{name} {old!r} → {new!r}" for name, (old, new) in list(changed.items())[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ValueError(
            f"{run} is a run with other settings ({first}{more}): give the same command to go on with it, "
            "or another --out to begin a new one"
        )


def check_writable(run: Path, needed: int) -> None:
    """Says before training what would stop a save: no permission, or less room than two checkpoints need."""
    run.mkdir(parents=True, exist_ok=True)
    probe = run / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(b"x")
    except OSError as error:
        raise OSError(f"cannot write to {run}: {error.strerror or error}") from None
    finally:
        probe.unlink(missing_ok=True)
    free = shutil.disk_usage(run).free
    if free < needed:
        raise OSError(
            f"{run} has {free / 2**20:,.0f} MiB free, and two checkpoints need {needed / 2**20:,.0f} MiB: "
            "make room, or choose another --out"
        )


def checkpoint_bytes(model: nn.Module) -> int:
    """About what one checkpoint takes: the model and AdamW's two averages."""
    return sum(x.numel() * x.element_size() for x in model.state_dict().values()) * 3


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Those of this process."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets this process's; one from another kind of device is left out."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def memory_values(state: StackState) -> Values:
    """A carried memory as plain values, on the CPU."""
    tensors = {f"state.{name}": x.detach().cpu() for name, x in state.tensors().items()}
    return {"tensors": tensors, "values": state_values(state, "state")}


def memory_from(values: Values, empty: StackState) -> StackState:
    """What `memory_values` described, where `empty` is."""
    tensors = {name: x.to(empty.length.device) for name, x in values["tensors"].items()}
    return fill_state(empty, tensors, values["values"], "state")
