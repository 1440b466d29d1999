"""Models on disk: a folder with `model.safetensors` and `config.json`, replaced as a whole or not at all.

A save writes a folder beside the old one, flushes it, and swaps the two by renames:

    .name.partial   being written; never read
    .name.new       complete; `name` may be missing now, and is then read from here
    .name.old       the one before, being removed; never read

Killed at any moment, `load` finds the old checkpoint or the new one, and needs to repair nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longspan import __version__
from longspan.models.config import ModelConfig
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel, Transformer
from longspan.utils import choose

Model = Transformer | LanguageModel | EncoderDecoder | Classifier

FORMAT = 1
TENSORS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
CLASSES: dict[str, type[Model]] = {
    "Transformer": Transformer,
    "LanguageModel": LanguageModel,
    "EncoderDecoder": EncoderDecoder,
    "Classifier": Classifier,
}


def save(model: Model, folder: str | os.PathLike[str]) -> None:
    """Writes the model to `folder`, replacing a checkpoint that is there; one process at a time.

    Parameters and buffers keep their dtype. Tensors that share memory are written once.
    """
    check_savable(model)
    with replacing(folder, (TENSORS, CONFIG)) as partial:
        write(model, partial)


def check_savable(model: nn.Module) -> None:
    """Refuses what `load` could not build again."""
    if type(model) not in CLASSES.values():
        raise ValueError(
            f"save takes a {', '.join(CLASSES)}, got a {type(model).__name__}; "
            "pass the model itself, not a wrapper around it or a class derived from it"
        )
    _check_survives_json(_arguments(model))


def write(model: Model, folder: Path) -> None:
    """The two files of a checkpoint into a folder that is there: of `replacing`, to be exchanged with others beside."""
    save_file(_stored(model)[0], folder / TENSORS, metadata={"format": "pt"})
    description = describe(model) | {"sha256": digests(folder)}
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Model:
    """The model that `save` wrote to `folder`, in the dtypes it had, as new: in training mode, on the CPU or `device`.

    Nothing in the folder is executed, and the random state is left as it was. Mechanisms of a user's own must be
    registered first.
    """
    description, tensors = _read(Path(folder).resolve())
    where = Path(folder) / CONFIG
    cls = CLASSES[choose(f"class in {where}", description["class"], CLASSES)]
    try:
        arguments: dict[str, Any] = {
            name: ModelConfig.from_dict(value) if isinstance(value, Mapping) else value
            for name, value in description["arguments"].items()
        }
        with torch.random.fork_rng(devices=[]):
            model = cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot build the {cls.__name__} that {where} describes: {error}") from error
    _fill(model, tensors, description["ties"], folder)
    return model.to(device)


def describe(model: Model) -> dict[str, Any]:
    """What `config.json` says of a model, but for the digest of its tensors."""
    return {
        "model_type": "longspan",
        "format": FORMAT,
        "longspan": __version__,
        "class": type(model).__name__,
        "arguments": _arguments(model),
        "ties": _stored(model)[1],
    }


def digests(folder: Path) -> str | dict[str, str]:
    """The SHA-256 of a folder's tensors, or of each file they are divided into."""
    if not (folder / INDEX).exists():
        return _digest(folder / TENSORS)
    names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return {name: _digest(folder / name) for name in sorted(names)}


@contextmanager
def replacing(folder: str | os.PathLike[str], names: Collection[str]) -> Iterator[Path]:
    """A new folder to write files of these names into; it takes the place of `folder` when the block ends.

    Killed at any moment, `settled(folder)` is the old folder or the new one. A folder that holds anything else is
    refused, because what it holds would be lost.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a checkpoint is a folder")
    others = sorted(set(os.listdir(folder)) - set(names)) if folder.exists() else []
    if others:
        raise ValueError(
            f"{folder} holds more than a checkpoint ({_listed(others)}), which replacing it would delete: "
            "choose a folder of its own"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, new, old = (_beside(folder, stage) for stage in ("partial", "new", "old"))
    if not folder.exists() and new.exists():
        os.rename(new, folder)  # An earlier swap was cut off after the old folder had gone.
    for leftover in (partial, new, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            _flush(path)
        _flush(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    os.rename(partial, new)
    _flush(folder.parent)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    _flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def settled(folder: Path) -> Path:
    """Where the contents of `folder` are: beside it, if a swap was cut off; FileNotFoundError if nowhere."""
    new = _beside(folder, "new")
    for path in (folder, new, folder):  # Twice: a swap may end while we look.
        if path.is_dir():
            return path
    raise FileNotFoundError(f"there is no checkpoint folder {folder}")


def _beside(folder: Path, stage: str) -> Path:
    return folder.with_name(f".{folder.name}.{stage}")


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no such call for folders.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _arguments(model: nn.Module) -> dict[str, Any]:
    """What the model's class was called with."""
    if isinstance(model, EncoderDecoder):
        return {
            "encoder": model.encoder.config.to_dict(),
            "decoder": model.decoder.config.to_dict(),
            "pad_token": model.pad_token,
            "tie_embeddings": model.encoder.embedding is model.decoder.embedding,
        }
    assert isinstance(model, Transformer | LanguageModel | Classifier)
    return {"config": model.config.to_dict()}


def _check_survives_json(description: Mapping[str, Any]) -> None:
    def refuse(value: object) -> None:
        raise ValueError(
            f"the model's configuration holds an object of type {type(value).__name__}, which JSON cannot: "
            "only names and numbers can be saved"
        )

    json.dumps(description, default=refuse)


def _stored(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to write, each once, and the names of those that are another's: {name: the name it is stored under}."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[int, str] = {}
    memory: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in names:
            ties[name] = names[id(tensor)]
            continue
        names[id(tensor)] = name
        stored = tensor.detach().cpu().contiguous()
        # Different views of one memory are written apart, each whole.
        where = stored.untyped_storage().data_ptr()
        tensors[name] = stored.clone() if where in memory else stored
        memory.add(where)
    return tensors, ties


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of one and the same save, also while another process saves."""
    while True:
        path = settled(folder)
        before = _identity(path)
        try:
            description = _read_description(path / CONFIG)
            whole = description["sha256"]
            tensors: dict[str, Tensor] = {}
            for name, digest in ({TENSORS: whole} if isinstance(whole, str) else whole).items():
                tensors |= _read_tensors(path / name, digest)
        except (FileNotFoundError, ValueError):
            if _identity(path) == before:
                raise
            continue  # The folder was exchanged as we read it.
        if _identity(path) == before:
            return description, tensors


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def _read_description(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: it is not a checkpoint that save() wrote")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it cannot be read as JSON: {error}") from error
    if not isinstance(description, dict) or "format" not in description:
        raise ValueError(f"{path} has no format field: it is not a checkpoint that save() wrote")
    if description["format"] != FORMAT:
        raise ValueError(
            f"{path} is of format {description['format']!r}, written by longspan {description.get('longspan')}; "
            f"this longspan ({__version__}) reads format {FORMAT}: install the one that wrote it, or a later one"
        )
    for field, *kinds in (("class", str), ("arguments", dict), ("ties", dict), ("sha256", str, dict)):
        if not isinstance(description.get(field), tuple(kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{path} is damaged: {field} must be a {wanted}, got {description.get(field)!r}")
    return description


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: restore it from the save that wrote {CONFIG}")
    tensors: dict[str, Tensor] = {}
    problem = None
    try:
        tensors = load_file(path)
    except (SafetensorError, RuntimeError, OSError) as error:  # torch maps the file and has errors of its own.
        problem = str(error)
    if problem is None and _digest(path) != digest:
        problem = f"its SHA-256 is not the one in {CONFIG}"
    if problem is not None:
        raise ValueError(f"{path} is damaged or from another save: {problem}; restore both files from one save")
    return tensors


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], ties: Mapping[str, str], folder: object) -> None:
    """Copies the tensors into the model, and ties what was tied."""
    given = {**tensors, **{name: tensors[stored] for name, stored in ties.items() if stored in tensors}}
    has = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(has.items())}
    shapes = [
        f"{name} {tuple(given[name].shape)} for {tuple(tensor.shape)}"
        for name, tensor in has.items()
        if name in given and given[name].shape != tensor.shape
    ]
    problems = {
        "missing": [name for name in has if name not in given],
        "unknown": [name for name in given if name not in has],
        "of another shape": shapes,
        "stored apart, but one in the model": [n for n in tensors if n in has and first[id(has[n])] != n],
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)
        raise ValueError(
            f"the tensors in {folder} do not fit the {type(model).__name__} its {CONFIG} describes ({found}); "
            f"restore {CONFIG}, or load with the longspan that wrote it"
        )
    for name, stored in ties.items():
        if has[name] is not has[stored]:  # Tied by hand: the configuration does not know.
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, has[stored])
    for name, tensor in has.items():
        tensor.data = tensor.data.to(given[name].dtype)
    model.load_state_dict(given)


def _listed(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
