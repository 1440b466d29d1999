"""What a checkpoint folder needs for transformers to open it with trust_remote_code."""

from __future__ import annotations

import shutil
from pathlib import Path

import longspan

STUB = "modeling_longspan.py"
_HEADS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


def auto_map(kind: str, heads: tuple[str, ...]) -> dict[str, str]:
    """Return the entry of `config.json` that names the classes of the stub, such as LongspanForCausalLM."""
    module = Path(STUB).stem
    found = {"AutoConfig": f"{module}.{kind}Config", "AutoModel": f"{module}.{kind}Model"}
    return found | {f"AutoModelFor{head}": f"{module}.{kind}For{head}" for head in heads}


LONGSPAN_MAP = auto_map("Longspan", (*_HEADS, "Seq2SeqLM"))
SWAPPED_MAP = auto_map("Swapped", (*_HEADS, "ImageClassification"))


def write_stub(folder: Path) -> None:
    """Copy the stub, which imports the installed longspan, into a folder."""
    shutil.copyfile(Path(longspan.__file__).parent / "hf" / STUB, folder / STUB)
