"""The checkpoint of a run: everything that the next step depends on, in a folder that is replaced atomically.

`checkpoint/model.safetensors` and `config.json` are the model, as `longspan.load` reads it. `training.pt` contains the
optimizer, the position in the data, random states and carried recurrent states.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.generation.session import fill_state, state_values
from longspan.generation.tokenization import TOKENIZER
from longspan.models.checkpoint import CONFIG, TENSORS, Model, committed_folder, replace_folder, write
from longspan.models.checkpoint import load as load_model
from longspan.models.config import ModelConfig
from longspan.models.residual import StackState
from longspan.train.config import FREE, differences

RUN, FOLDER, TRAINING = "run.json", "checkpoint", "training.pt"


def save(run: Path, model: Model, training: dict[str, Any], tokenizer: Path | None) -> None:
    """Write a checkpoint. If this fails, the previous one remains."""
    with replace_folder(run / FOLDER, (TENSORS, CONFIG, TRAINING, TOKENIZER)) as partial:
        write(model, partial)
        torch.save(training, partial / TRAINING)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / TOKENIZER)


def load(run: Path) -> tuple[Model, dict[str, Any]] | None:
    """Return the model and the training state of the last checkpoint; None if the run has none."""
    try:
        folder = committed_folder((run / FOLDER).resolve())
    except FileNotFoundError:
        return None
    # weights_only: nothing in the file is executed.
    training = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
    if "optimiser" in training:  # written before version 0.2
        training["optimizer"] = training.pop("optimiser")
        settings = training["about"]["settings"]
        settings["model"] = json.loads(json.dumps(ModelConfig.from_dict(settings["model"]).to_dict()))
    return load_model(run / FOLDER), training


def check_settings(run: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError if the data, or a setting that must not change, differs when a run is resumed.

    Args:
        run: The folder of the run.
        before: Metadata of the checkpoint.
        now: Metadata of the command.
    """
    found = differences(before["settings"], now["settings"])
    changed = {name: pair for name, pair in found.items() if name.removeprefix("train.") not in FREE}
    if changed:
        shown = ", ".join(f"{name} {old!r} → {new!r}" for name, (old, new) in list(changed.items())[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ValueError(
            f"{run} is a run with other settings ({shown}{more}): use the same settings to resume it, "
            "or another --out to start a new run"
        )
    if before["data"]["sha256"] != now["data"]["sha256"]:
        raise ValueError(f"the data of {run} has changed since the run started: restore it, or use another --out")


def check_writable(run: Path, required: int) -> None:
    """Create the folder of a run and check that checkpoints can be written to it.

    Args:
        run: The folder.
        required: Bytes that must be free.

    Raises:
        OSError: The folder is not writable, or the disk is too full.
    """
    run.mkdir(parents=True, exist_ok=True)
    try:
        tempfile.TemporaryFile(dir=run).close()
    except OSError as error:
        raise OSError(f"cannot write to {run}: {error.strerror or error}") from None
    free = shutil.disk_usage(run).free
    if free < required:
        raise OSError(
            f"{run} has {free / 2**20:,.0f} MiB free, and two checkpoints need {required / 2**20:,.0f} MiB: "
            "free disk space, or choose another --out"
        )


def size_in_bytes(model: nn.Module) -> int:
    """Return the approximate size of a checkpoint: the model and two AdamW moments."""
    return sum(x.numel() * x.element_size() for x in model.state_dict().values()) * 3


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the random states of this process."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the random states of this process; that of CUDA only if it was saved and CUDA is in use."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def pack_state(state: StackState) -> dict[str, Any]:
    """Convert a recurrent state to CPU tensors and Python values."""
    tensors = {f"state.{name}": x.detach().cpu() for name, x in state.tensors().items()}
    return {"tensors": tensors, "values": state_values(state, "state")}


def unpack_state(packed: dict[str, Any], empty: StackState) -> StackState:
    """Restore a state that `pack_state` returned, on the device of `empty`, a new state of the same model."""
    tensors = {name: x.to(empty.length.device) for name, x in packed["tensors"].items()}
    return fill_state(empty, tensors, packed["values"], "state")
