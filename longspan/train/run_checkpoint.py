"""The checkpoints of a run: everything that the next step depends on.

    checkpoint/             the last one, replaced atomically
    checkpoint-previous/    the one before it

`model.safetensors` and `config.json` are the model, as `longspan.load` reads it; the folder of the run has a copy of
`config.json` for transformers. `training.pt` contains the optimizer, the position in the data, random states and
carried recurrent states. `SHA256SUMS` has the digest of each file.

A run with --mesh writes sharded checkpoints (`longspan.models.sharded`): `*.distcp` files in place of
`model.safetensors` and of the optimizer in `training.pt`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.generation.session import fill_state, state_values
from longspan.generation.tokenization import TOKENIZER, TOKENIZER_SETTINGS
from longspan.models.adapter import ADAPTER, ADAPTER_CONFIG, read_adapter
from longspan.models.checkpoint import (
    CHECKSUMS,
    CONFIG,
    LAST,
    TENSORS,
    Model,
    find_checkpoint,
    partial_folder,
    previous_folder,
    read_committed,
    replace_folder,
    verify_checksums,
    write,
    write_checksums,
)
from longspan.models.checkpoint import load as load_model
from longspan.models.config import ModelConfig
from longspan.models.residual import StackState
from longspan.models.sharded import METADATA, is_sharded, shard_files
from longspan.train.config import FREE, TrainConfig, differences
from longspan.utils import read_json, write_atomically

TRAINING = "training.pt"
_NAMES = (TENSORS, CONFIG, TRAINING, TOKENIZER, CHECKSUMS, METADATA, "*.distcp", ADAPTER, ADAPTER_CONFIG)


def save(
    run: Path,
    model: Model,
    training: dict[str, Any],
    tokenizer: Path | None,
    *,
    keep: bool = True,
    more: Mapping[str, Any] | None = None,
    adapter: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint. If this fails, the last one remains.

    Args:
        run: The folder of the run.
        model: The model.
        training: The rest of the state.
        tokenizer: The tokenizer file of the run, to copy with the settings beside it.
        keep: Keep the last checkpoint as the previous one. False: replace it.
        more: Entries to add to `config.json`.
        adapter: Writes the LoRA adapter of the model into a folder.
    """
    files = _tokenizer_files(tokenizer)
    with replace_folder(run / LAST, (*_NAMES, *files), mark=TRAINING, keep=keep) as partial:
        known = write(model, partial, more)
        torch.save(training, partial / TRAINING)
        if adapter is not None:
            adapter(partial)
        for name, path in files.items():
            shutil.copyfile(path, partial / name)
        write_checksums(partial, known)
    _copy_description(run)


def _tokenizer_files(tokenizer: Path | None) -> dict[str, Path]:
    """Return the file of a tokenizer and the settings beside it, by their names in a checkpoint."""
    if tokenizer is None:
        return {}
    beside = {name: tokenizer.parent / name for name in TOKENIZER_SETTINGS}
    return {TOKENIZER: tokenizer} | {name: path for name, path in beside.items() if path.is_file()}


def _copy_description(run: Path) -> None:
    """Copy `config.json` to the folder of a run, so that transformers opens it; a foreign file stays."""
    path = run / CONFIG
    with suppress(OSError, ValueError, AttributeError):
        if not path.exists() or read_json(path).get("model_type") == "longspan":
            write_atomically(path, (run / LAST / CONFIG).read_text(encoding="utf-8"))


class ShardedCheckpoint:
    """A checkpoint that several processes write: open it, let every process write its shards, and finish it.

    Args:
        run: The folder of the run.
        tokenizer: The tokenizer file of the run, to copy with the settings beside it.
        keep: Keep the last checkpoint as the previous one. False: replace it.

    Attributes:
        folder: Where the shards are written.
    """

    def __init__(self, run: Path, tokenizer: Path | None, *, keep: bool) -> None:
        self.folder = partial_folder(run / LAST)
        self._run, self._keep, self._stack = run, keep, ExitStack()
        self._files = _tokenizer_files(tokenizer)

    def open(self) -> None:
        """Create the folder; the main process does this."""
        names = (*_NAMES, *self._files)
        self._stack.enter_context(replace_folder(self._run / LAST, names, mark=TRAINING, keep=self._keep))

    def finish(self, digests: dict[str, str], description: dict[str, Any], training: dict[str, Any]) -> None:
        """Write the other files and replace the last checkpoint; the main process does this after the shards.

        Args:
            digests: The SHA-256 of each shard file.
            description: What `longspan.models.checkpoint.describe` returned for the model.
            training: The rest of the state.
        """
        with self._stack:
            (self.folder / CONFIG).write_text(
                json.dumps(description | {"sha256": {}}, indent=2) + "\n", encoding="utf-8"
            )
            torch.save(training, self.folder / TRAINING)
            for name, path in self._files.items():
                shutil.copyfile(path, self.folder / name)
            write_checksums(self.folder, digests)
        _copy_description(self._run)


def load(run: Path, process: int = 0, processes: int = 1) -> tuple[Model | None, dict[str, Any]] | None:
    """Return the model and the training state of the last checkpoint; None if the run has none.

    The model is None for a sharded checkpoint, whose weights `longspan.distributed.checkpoint.load_sharded` reads.

    Args:
        run: The folder of the run.
        process: The number of this process, which verifies its share of the shards.
        processes: The number of processes.

    Raises:
        ValueError: A file is damaged.
    """
    folder = find_checkpoint(run)
    if folder == run:
        return None
    return read_committed(folder, lambda path: _load(path, folder, slice(process, None, processes)))


def _load(path: Path, folder: Path, share: slice) -> tuple[Model | None, dict[str, Any]]:
    other = previous_folder(folder)
    advice = "restore it from a copy, or use another --out to start a new run"
    if folder.name == LAST and other.is_dir():
        advice = f"restore it from a copy, or remove {folder} to resume from the checkpoint before it, {other.name}"
    if not (path / TRAINING).exists():
        raise ValueError(f"{folder} has no {TRAINING}, so that no run can be resumed from it: {advice}")
    sharded = is_sharded(path)
    names = [*(shard_files(path)[share] if sharded else [TENSORS]), CONFIG, TRAINING]
    names += [name for name in (TOKENIZER, ADAPTER, ADAPTER_CONFIG) if (path / name).exists()]
    verify_checksums(path, names, advice)
    try:
        # weights_only: nothing in the file is executed.
        training = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of several kinds for damaged files.
        raise ValueError(f"{folder / TRAINING} is damaged: {advice}") from error
    if "optimiser" in training:  # written before version 0.2
        training["optimizer"] = training.pop("optimiser")
    settings = training["about"]["settings"]
    # Fields that were added since have their defaults.
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    settings["train"] = json.loads(json.dumps(defaults)) | settings["train"]
    settings["model"] = json.loads(json.dumps(ModelConfig.from_dict(settings["model"]).to_dict()))
    if settings["train"]["lora_rank"] is not None:
        training["adapter"] = read_adapter(path)[1]
    return None if sharded else load_model(path, adapter=False), training


def check_settings(run: Path, before: dict[str, Any], settings: dict[str, Any], processes: int) -> list[str]:
    """Compare the settings of a command with those of the run that it resumes.

    Some may change: FREE ones, lower learning rates and a longer warmup, and the number of processes if a step reads
    as many sequences as before.

    Args:
        run: The folder of the run.
        before: Metadata of the checkpoint.
        settings: Settings of the command, as `described` returns them.
        processes: Number of processes of the command that read different sequences.

    Returns:
        Changes that affect the next steps, to be shown.

    Raises:
        ValueError: A setting that must not change differs.
    """
    found = differences(before["settings"], settings)
    changed = {name: pair for name, pair in found.items() if name.removeprefix("train.") not in FREE}
    allowed = []
    for name, sign in (("lr", -1), ("muon_lr", -1), ("embedding_lr", -1), ("warmup", 1)):
        old, new = changed.get(f"train.{name}", (None, None))
        if old is not None and new is not None and sign * new > sign * old:
            del changed[f"train.{name}"]
            allowed.append(f"--{name.replace('_', '-')} {old} → {new}")
    readers = before.get("data_processes", before["processes"])
    if processes != readers:
        sizes = before["settings"]["train"]["batch_size"], settings["train"]["batch_size"]
        allowed.append(_check_processes(run, (readers, processes), sizes))
        changed.pop("train.batch_size", None)
    if changed:
        shown = ", ".join(f"{name} {old!r} → {new!r}" for name, (old, new) in list(changed.items())[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ValueError(
            f"{run} is a run with other settings ({shown}{more}): use the same settings to resume it, "
            "or another --out to start a new run"
        )
    return allowed


def _check_processes(run: Path, processes: tuple[int, int], sizes: tuple[int, int]) -> str:
    """Return a description of the change of processes and batch sizes; raise ValueError if the whole batch changes."""
    old, new = (f"{n} × --batch-size {size}" for n, size in zip(processes, sizes, strict=True))
    total = processes[0] * sizes[0]
    if total == processes[1] * sizes[1]:
        return f"processes {old} → {new}: steps read the same sequences, and losses agree up to rounding"
    fitting = f" --batch-size {total // processes[1]}, or" if total % processes[1] == 0 else ""
    raise ValueError(
        f"{run} was trained with processes {old} = {total} sequences, this command has {new} = "
        f"{processes[1] * sizes[1]}: use{fitting} the number of processes of before"
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
