"""Checkpoints: a folder with `model.safetensors` and `config.json`, replaced atomically.

`save` writes a new folder next to the old one, flushes it to disk, and swaps the two by renames:

    .name.partial   being written; never read
    .name.new       complete; read if `name` is missing
    .name.old       the previous one, being removed; never read

If the process is killed at any moment, `load` finds the old checkpoint or the new one. A training run keeps the
previous checkpoint, in a folder beside the last one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longspan import __version__
from longspan.models.adapter import ADAPTER_CONFIG, merge_adapter
from longspan.models.config import OF_TOKENS, ModelConfig
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel, Transformer
from longspan.utils import choose, join_names, read_json

Model = Transformer | LanguageModel | EncoderDecoder | Classifier
T = TypeVar("T")

FORMAT = 1
TENSORS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
LAST = "checkpoint"  # in the folder of a run
CHECKSUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
CLASSES: dict[str, type[Model]] = {
    "Transformer": Transformer,
    "LanguageModel": LanguageModel,
    "EncoderDecoder": EncoderDecoder,
    "Classifier": Classifier,
}


def save(model: Model, folder: str | os.PathLike[str]) -> None:
    """Save a model to a folder, replacing a checkpoint in it.

    Parameters and buffers keep their dtype. Tied tensors are written once. Only one process may save at a time.

    Args:
        model: The model itself, not a wrapper around it.
        folder: The checkpoint folder.

    Raises:
        ValueError: If the model is of another class, its configuration cannot be represented in JSON, or the folder
            holds other files.
    """
    check_savable(model)
    with replace_folder(folder, (TENSORS, CONFIG)) as partial:
        write(model, partial)


def check_savable(model: nn.Module) -> None:
    """Raise ValueError for a model that `load` could not build again."""
    if type(model) not in CLASSES.values():
        raise ValueError(
            f"save takes a {', '.join(CLASSES)}, got a {type(model).__name__}; "
            "pass the model itself, not a wrapper around it or a class derived from it"
        )
    _check_survives_json(_arguments(model))


def write(model: Model, folder: Path, more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Write the two files of a checkpoint into an existing folder, such as that of `replace_folder`.

    Args:
        model: The model.
        folder: The folder.
        more: Entries to add to `config.json`.

    Returns:
        The SHA-256 of the tensor file, by its name.
    """
    save_file(_stored(model)[0], folder / TENSORS, metadata={"format": "pt"})
    digest = file_digest(folder / TENSORS)
    description = describe(model) | {"sha256": digest, **(more or {})}
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / CONFIG, folder / TENSORS)  # safetensors creates files that only their owner can read.
    return {TENSORS: digest}


def _read_config(values: Mapping[str, Any]) -> ModelConfig:
    # Before version 0.2 models of vectors accepted options of embeddings of tokens, and ignored them.
    ignored = {**OF_TOKENS, "axial_shape": None} if values.get("vocab_size") is None else {}
    return ModelConfig.from_dict({**values, **ignored})


def load(folder: str | os.PathLike[str], *, device: torch.device | str | None = None, adapter: bool = True) -> Model:
    """Load a model from a checkpoint folder or a run's folder, in the dtypes it was saved in and in training mode.

    Nothing in the folder is executed, and the random state is not changed. Mechanisms that are not installed as
    plug-ins must be registered first.

    Args:
        folder: The checkpoint folder, or the folder of a run, whose last checkpoint is loaded.
        device: Where to put the model; the CPU by default.
        adapter: Whether to merge a LoRA adapter that is beside the model into its weights.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If a file is damaged, or the tensors do not fit the configuration.
    """
    try:
        target = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a device such as cpu or cuda:0, got {device!r}: {error}") from None
    folder = find_checkpoint(Path(folder))
    description, tensors = read_committed(folder, _read_merged if adapter else _read)
    where = folder / CONFIG
    cls = CLASSES[choose(f"class in {where}", description["class"], CLASSES)]
    try:
        arguments: dict[str, Any] = {
            name: _read_config(value) if isinstance(value, Mapping) else value
            for name, value in description["arguments"].items()
        }
        for config in arguments.values():
            if isinstance(config, ModelConfig) and config.depth > len(tensors) + len(description["ties"]):
                raise ValueError(f"it has {config.depth} layers, and there are {len(tensors)} tensors")
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                # Without memory: a damaged configuration may describe a model of any size.
                _check_fit(cls(**arguments), tensors, description["ties"], folder)
            model = cls(**arguments)
    except _MismatchError:
        raise
    except (AttributeError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"cannot build the {cls.__name__} that {where} describes: {error}") from error
    _fill(model, tensors, description["ties"])
    return model.to(target)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, tied ones under each of theirs, with a LoRA adapter merged."""
    description, tensors = read_committed(find_checkpoint(folder), _read_merged)
    return _with_ties(tensors, description["ties"])


def describe(model: Model) -> dict[str, Any]:
    """Return the contents of `config.json`, without the digest of the tensors."""
    return {
        "model_type": "longspan",
        "format": FORMAT,
        "longspan": __version__,
        "class": type(model).__name__,
        "arguments": _arguments(model),
        "ties": _stored(model)[1],
    }


def digests(folder: Path) -> str | dict[str, str]:
    """Return the SHA-256 of the tensor file, or of each file if there are several."""
    if not (folder / INDEX).exists():
        return file_digest(folder / TENSORS)
    names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return {name: file_digest(folder / name) for name in sorted(names)}


@contextmanager
def replace_folder(
    folder: str | os.PathLike[str],
    names: Collection[str],
    *,
    mark: str | None = None,
    keep: bool = False,
    what: str = "a checkpoint",
) -> Iterator[Path]:
    """Yield a new folder to write files into, which replaces `folder` when the block ends.

    If the process is killed at any moment, `committed_folder` is the old folder or the new one.

    Args:
        folder: The folder to create or replace.
        names: The files that the block may write, or patterns of their names. A folder with others is refused,
            because they would be lost.
        mark: One of the names. A folder with this file may hold others, which are moved to the new folder.
        keep: Keep the replaced folder as `previous_folder`, in place of the one before it.
        what: What the folder is, for errors.

    Raises:
        ValueError: If `folder` is a file, or holds other files.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; {what} is a folder")
    others = _others(folder, names)
    if others and (mark is None or not (folder / mark).exists()):
        raise ValueError(
            f"{folder} holds more than {what} ({join_names(others, 8)}), which replacing it would delete: "
            "choose a folder of its own"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, new, old = (_sibling(folder, stage) for stage in ("partial", "new", "old"))
    if not folder.exists() and new.exists():
        os.rename(new, folder)  # An earlier swap was interrupted after the old folder was renamed.
    previous = previous_folder(folder)
    if keep and old.exists() and not previous.exists():
        os.rename(old, previous)  # An earlier swap was interrupted before that.
    _remove(old, folder, names)
    for leftover in (partial, new):
        if leftover.exists():
            shutil.rmtree(leftover)
    os.mkdir(partial)
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
        if keep and previous.exists():
            os.rename(previous, old)
        os.rename(folder, previous if keep else old)
    os.rename(new, folder)
    _flush(folder.parent)
    if keep:
        _move_others(previous, folder, names)
    _remove(old, folder, names)


def committed_folder(folder: Path) -> Path:
    """Return the folder with the last complete contents of `folder`: itself, or the new one of an interrupted swap.

    Raises:
        FileNotFoundError: If there is neither.
    """
    new = _sibling(folder, "new")
    for path in (folder, new, folder):  # Twice: a swap may end between the checks.
        if path.is_dir():
            return path
    raise FileNotFoundError(f"there is no checkpoint folder {folder}")


def read_committed(folder: str | os.PathLike[str], read: Callable[[Path], T]) -> T:
    """Return what `read` returns for the last complete contents of a folder, which another process may be replacing.

    Args:
        folder: The folder that `replace_folder` writes.
        read: Reads files of the folder that it is called with. It is called again if that was replaced meanwhile.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    folder = Path(folder).resolve()
    while True:
        path = committed_folder(folder)
        before = _identity(path)
        try:
            found = read(path)
        except (OSError, ValueError):
            if _is_committed(folder, path, before):
                raise
            continue
        if _is_committed(folder, path, before):
            return found


def _is_committed(folder: Path, path: Path, identity: tuple[int, int] | None) -> bool:
    """Whether `path` still holds the contents of a folder. Another process may be writing the next ones there."""
    return committed_folder(folder) == path and _identity(path) == identity


def previous_folder(folder: Path) -> Path:
    """Return where `replace_folder` keeps the contents that it replaced."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}-previous")


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of the run in `folder`: the last one, or the one before if that was removed.

    If there is none, `folder` itself is returned: it may be a checkpoint.
    """
    last = folder / LAST
    for path in (last, previous_folder(last)):
        with suppress(FileNotFoundError):
            committed_folder(path.resolve())
            return path
    return folder


def write_checksums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the SHA-256 of each file in a folder to `SHA256SUMS`.

    Args:
        folder: The folder.
        known: Digests by file name that need not be computed again.
    """
    known = known or {}
    lines = [f"{known.get(path.name) or file_digest(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def verify_checksums(folder: Path, names: Collection[str], advice: str) -> None:
    """Raise ValueError if a file is not the one that `write_checksums` saw.

    Folders without `SHA256SUMS`, which were written before version 0.2, are not verified.

    Args:
        folder: The folder.
        names: The files to verify.
        advice: What to do about a damaged file.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return
    try:
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except ValueError:
        raise ValueError(f"{path} is damaged: {advice}") from None
    for name in names:
        if name not in sums:
            raise ValueError(f"{path} is damaged, it does not list {name}: {advice}")
        if not (folder / name).exists():
            raise ValueError(f"{folder} has no {name}: {advice}")
        if file_digest(folder / name) != sums[name]:
            raise ValueError(f"{folder / name} is damaged, its SHA-256 is not the one in {CHECKSUMS}: {advice}")


def _others(folder: Path, names: Collection[str]) -> list[str]:
    """Return the names in a folder that are neither among `names` nor files that file managers create."""
    if not folder.is_dir():
        return []
    known = (*names, ".DS_Store", "Thumbs.db", "desktop.ini")
    return sorted(name for name in os.listdir(folder) if not any(fnmatchcase(name, pattern) for pattern in known))


def _remove(folder: Path, target: Path, names: Collection[str]) -> None:
    """Remove a folder, if it exists; files that are not among `names` are moved to `target`."""
    if folder.exists():
        _move_others(folder, target, names)
        shutil.rmtree(folder)


def _move_others(folder: Path, target: Path, names: Collection[str]) -> None:
    for name in _others(folder, names):
        if target.is_dir() and not (target / name).exists():
            os.rename(folder / name, target / name)


def partial_folder(folder: Path) -> Path:
    """Return the folder that `replace_folder` yields."""
    return _sibling(folder.resolve(), "partial")


def _sibling(folder: Path, stage: str) -> Path:
    return folder.with_name(f".{folder.name}.{stage}")


def _flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot flush folders.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of the model's constructor."""
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
            f"the model's configuration holds an object of type {type(value).__name__}, which JSON cannot represent: "
            "only names and numbers can be saved"
        )

    json.dumps(description, default=refuse)


def _stored(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write, each once, and the names of tied ones: {name: the name it is stored under}."""
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
        # Different views of one storage are written separately.
        where = stored.untyped_storage().data_ptr()
        tensors[name] = stored.clone() if where in memory else stored
        memory.add(where)
    return tensors, ties


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors of a checkpoint."""
    description = _read_description(folder / CONFIG)
    digest = description["sha256"]
    if (folder / ".metadata").is_file():
        from longspan.models.sharded import read_model

        return description, read_model(folder)
    tensors: dict[str, Tensor] = {}
    for name, expected in ({TENSORS: digest} if isinstance(digest, str) else digest).items():
        tensors |= _read_tensors(folder / name, expected)
    return description, tensors


def _read_merged(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors of a checkpoint, after its LoRA adapter is merged, if it has one."""
    base = folder
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).exists():
        name = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        base = Path(name) if isinstance(name, str) else folder
        if not (base / CONFIG).exists():
            raise FileNotFoundError(f"{folder} is an adapter of {name!r}, where there is no checkpoint: restore it")
    description, tensors = _read(base)
    if (folder / ADAPTER_CONFIG).is_file():
        merge_adapter(tensors, description["ties"], folder)
    elif description.get("adapter"):
        raise FileNotFoundError(f"{folder} has no {ADAPTER_CONFIG}: restore it from the save that wrote {CONFIG}")
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
    description = read_json(path)
    if isinstance(description, dict) and description.get("model_type", "longspan") != "longspan":
        raise ValueError(
            f"{path.parent} is a folder of transformers, of type {description['model_type']}: open it with "
            "transformers; longspan generate, serve and info open decoders that longspan.hf.to_language_model converts"
        )
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
    texts = description["ties"] | (description["sha256"] if isinstance(description["sha256"], dict) else {})
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{path} is damaged: {name} must be a text, got {value!r}")
    for name in description["sha256"] if isinstance(description["sha256"], dict) else ():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{path} names the tensor file {name!r}, which is not a file beside it")
    return description


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: restore it from the save that wrote {CONFIG}")
    tensors: dict[str, Tensor] = {}
    problem = None
    try:
        tensors = load_file(path)
    except (SafetensorError, RuntimeError, OSError) as error:  # RuntimeError: torch could not map the file.
        problem = str(error)
    if problem is None and file_digest(path) != digest:
        problem = f"its SHA-256 is not the one in {CONFIG}"
    if problem is not None:
        raise ValueError(f"{path} is damaged or from another save: {problem}; restore both files from one save")
    return tensors


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class _MismatchError(ValueError):
    """Tensors that do not fit the model."""


def _check_fit(model: nn.Module, tensors: Mapping[str, Tensor], ties: Mapping[str, str], folder: object) -> None:
    """Raise ValueError unless the tensors are those of the model."""
    given = _with_ties(tensors, ties)
    has = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(has.items())}
    shapes = [
        f"{name} {tuple(given[name].shape)} for {tuple(tensor.shape)}"
        for name, tensor in has.items()
        if name in given and given[name].shape != tensor.shape
    ]
    kinds = [
        f"{name} {given[name].dtype} for {tensor.dtype}"
        for name, tensor in has.items()
        if name in given and given[name].is_floating_point() != tensor.is_floating_point()
    ]
    problems = {
        "missing": [name for name in has if name not in given],
        "unknown": [name for name in {**given, **ties} if name not in has],
        "of another shape": shapes,
        "of another kind": kinds,
        "stored separately, but tied in the model": [n for n in tensors if n in has and first[id(has[n])] != n],
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {join_names(names, 8)}" for what, names in problems.items() if names)
        raise _MismatchError(
            f"the tensors in {folder} do not fit the {type(model).__name__} its {CONFIG} describes ({found}); "
            f"restore {CONFIG}, or load with the longspan that wrote it"
        )


def _with_ties(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    return {**tensors, **{name: tensors[stored] for name, stored in ties.items() if stored in tensors}}


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Copy the tensors into the model, and tie those that were tied."""
    given, has = _with_ties(tensors, ties), model.state_dict(keep_vars=True)
    for name, stored in ties.items():
        if has[name] is not has[stored]:  # Tied by the user, not by the configuration.
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, has[stored])
    for name, tensor in has.items():
        tensor.data = tensor.data.to(given[name].dtype)
    model.load_state_dict(given)
