"""Load a teacher: a folder of transformers, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longspan.generation.tokenization import TOKENIZER
from longspan.hf.swap import ATTENTION_DROPOUT
from longspan.utils import join_names

MIN_GGUF = 24  # bytes of the header


class Teacher(NamedTuple):
    """A pretrained model and its tokenizer.

    Attributes:
        model: A transformers model in eval mode, whose weights have no gradients.
        tokenizer: Its tokenizer.
        encoder: Whether it is bidirectional, trained on masked tokens.
    """

    model: Any
    tokenizer: Any
    encoder: bool


def load_teacher(path: Path) -> Teacher:
    """Load a model and its tokenizer in float32, without dropout of attention weights, which mechanisms do not have.

    Args:
        path: The folder, or a GGUF file.

    Raises:
        ValueError: If there is no such model, a file is damaged, weights are missing, or the tokenizer does not fit.
    """
    if not path.exists():
        raise ValueError(f"--model {path}: there is no such folder or file")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path), "local_files_only": True}
    if path.is_file():
        _check_gguf(path)
        where |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif not (path / "config.json").is_file():
        raise ValueError(f"--model {path} has no config.json: give a folder that save_pretrained wrote, or a GGUF file")
    model, encoder = _load_model(path, where)
    tokenizer = _load_tokenizer(path, where)
    size = model.config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ValueError(
            f"--model {path}: the tokenizer has {len(tokenizer):,} tokens and the model {size:,}: use the tokenizer "
            "that the model was trained with"
        )
    return Teacher(model.eval().requires_grad_(False), tokenizer, encoder)


def _load_model(path: Path, where: Mapping[str, Any]) -> tuple[Any, bool]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    with _worded(path, "the model"):
        config = AutoConfig.from_pretrained(**where)
        if config.model_type.startswith("longspan"):
            raise ValueError(f"--model {path} is a longspan model already: give one with softmax attention")
        architectures = getattr(config, "architectures", None) or []
        encoder = any(name.endswith("ForMaskedLM") for name in architectures)
        cls = AutoModelForMaskedLM if encoder else AutoModelForCausalLM
        dropout = {name: 0.0 for name in ATTENTION_DROPOUT if getattr(config, name, None)}
        options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = cls.from_pretrained(**where, **dropout, **options)
    _check_weights(path, model, found)
    # A dequantized GGUF file is an ordinary model, which transformers refuses to save while it is marked.
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name) if name in vars(model) else setattr(model, name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, encoder


def _check_weights(path: Path, model: Any, found: Mapping[str, Any]) -> None:
    """Raise ValueError if weights are missing, of other shapes than those of the configuration, or not finite."""
    advice = "restore its files, or download it again"
    tied = (getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else ()
    missing = sorted(set(found["missing_keys"]) - set(tied))
    if missing:
        raise ValueError(f"--model {path} lacks weights ({join_names(missing, 4)}): {advice}")
    if found["mismatched_keys"]:
        wrong = [f"{name} {tuple(stored)} instead of {tuple(own)}" for name, stored, own in found["mismatched_keys"]]
        raise ValueError(
            f"--model {path} has weights that do not fit its config.json ({join_names(wrong, 4)}): {advice}"
        )
    broken = [name for name, x in model.named_parameters() if not bool(x.isfinite().all())]
    if broken:
        raise ValueError(f"--model {path} has weights that are not finite ({join_names(broken, 4)}): {advice}")


def _load_tokenizer(path: Path, where: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    with _worded(path, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**where)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"--model {path} has no {TOKENIZER}: convert its tokenizer with transformers, and save it there"
        )
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # what transformers builds where files are missing
        raise ValueError(f"--model {path} has a tokenizer without tokens: restore {TOKENIZER}, or download it again")
    return tokenizer


def _check_gguf(path: Path) -> None:
    with open(path, "rb") as file:
        head = file.read(MIN_GGUF)
    if len(head) < MIN_GGUF or head[:4] != b"GGUF":
        raise ValueError(f"--model {path} is no GGUF file: give one, or the folder of a transformers model")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError(f"--model {path} needs the package gguf: pip install gguf") from None


@contextmanager
def _worded(path: Path, what: str) -> Iterator[None]:
    """Word the errors of transformers, safetensors and gguf: which file, and what to do."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # Damaged files raise errors of many kinds.
        if isinstance(error, ValueError) and str(error).startswith("--model"):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"--model {path}: {what} cannot be read ({reason}): the files are damaged or incomplete, download them "
            "again, or of an architecture that transformers does not know"
        ) from error
