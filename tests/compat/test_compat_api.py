"""Every public name of the five older libraries, with the same arguments: as recorded, and as installed."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from older import REFERENCE, original

from longspan.compat.import_hook import REPLACEMENTS

LIBRARIES = sorted(REPLACEMENTS)
# Names that scripts import from within the libraries.
INSIDE = {
    "linear_attention_transformer": {
        "autopadder": ["Autopadder"],
        "autoregressive_wrapper": ["AutoregressiveWrapper", "top_k", "top_p"],
        "images": ["ImageLinearAttention"],
        "linear_attention_transformer": ["LinearAttentionTransformer", "LinearAttentionTransformerLM", "SelfAttention"],
        "reversible": ["ReversibleSequence", "SequentialSequence"],
    },
    "linformer_pytorch": {
        "linformer_pytorch": ["Linformer", "LinformerLM", "MHAttention", "get_EF"],
        "padder": ["Padder"],
        "visualizer": ["Visualizer"],
    },
    "linformer": {
        "linformer": ["Linformer", "LinformerLM", "LinformerSelfAttention"],
        "reversible": ["ReversibleSequence", "SequentialSequence"],
    },
    "performer_pytorch": {
        "autoregressive_wrapper": ["AutoregressiveWrapper", "repetition_penalty_fn", "top_k", "top_p"],
        "performer_enc_dec": ["PerformerEncDec"],
        "performer_pytorch": ["FastAttention", "Performer", "PerformerLM", "SelfAttention"],
        "reversible": ["ReversibleSequence", "SequentialSequence"],
    },
    "local_attention": {
        "local_attention": ["LocalAttention"],
        "rotary": ["SinusoidalEmbeddings", "apply_rotary_pos_emb"],
        "transformer": ["DynamicPositionBias", "LocalMHA", "LocalTransformer", "top_k"],
    },
}

# Arguments that the originals lack: masks, and what their own documents pass.
ADDED = {
    "local_attention": {"faithful"},
    "linformer": {"mask"},
    "linformer_pytorch": {"use_pos_emb"},
    "performer_pytorch": {"tie_embedding", "mask"},
}
# Arguments that the originals require too, through **kwargs.
REQUIRED = {
    "performer_pytorch.PerformerEncDec.__init__": {
        f"{side}_{name}" for side in ("enc", "dec") for name in ("num_tokens", "max_seq_len", "depth", "heads")
    }
}


class Argument(NamedTuple):
    """One argument of a signature, written down so that two can be compared."""

    name: str
    kind: str
    default: str


def ours(library: str) -> ModuleType:
    return import_module(REPLACEMENTS[library])


def written(default: Any) -> str:
    """A default as its author would write it."""
    if default is inspect.Parameter.empty:
        return "none given"
    return getattr(default, "__name__", None) or repr(default)


def arguments(function: Any) -> list[Argument]:
    parameters = inspect.signature(function).parameters.values()
    return [Argument(p.name, p.kind.name, written(p.default)) for p in parameters]


def parsed(signature: str) -> list[Argument]:
    """The arguments in `(self, x, y=1, **kwargs)`; annotations are left out."""
    parts = ast.parse(f"def f{signature}: pass").body[0].args  # type: ignore[attr-defined]
    positional = [*parts.posonlyargs, *parts.args]
    defaults = [None] * (len(positional) - len(parts.defaults)) + list(parts.defaults)

    def one(name: str, kind: str, default: ast.expr | None) -> Argument:
        if default is None:
            return Argument(name, kind, "none given")
        try:
            return Argument(name, kind, repr(ast.literal_eval(default)))
        except ValueError:  # a name or a call, such as top_k or ReLU()
            return Argument(name, kind, ast.unparse(default))

    found = [one(a.arg, "POSITIONAL_OR_KEYWORD", d) for a, d in zip(positional, defaults, strict=True)]
    found += [Argument(a.arg, "VAR_POSITIONAL", "none given") for a in [parts.vararg] if a]
    found += [one(a.arg, "KEYWORD_ONLY", d) for a, d in zip(parts.kwonlyargs, parts.kw_defaults, strict=True)]
    return found + [Argument(a.arg, "VAR_KEYWORD", "none given") for a in [parts.kwarg] if a]


def check(where: str, function: Any, wanted: list[Argument]) -> None:
    """The same arguments in the same order.

    What went into *args or **kwargs there may have a name here, and what had to be given may have a default.
    """
    got, kinds = arguments(function), {a.kind for a in wanted}
    named, ours = ([a for a in arguments if not a.kind.startswith("VAR_")] for arguments in (wanted, got))
    # The order of keyword-only arguments has no meaning.
    order = {a.name: i for i, a in enumerate(named)}
    keywords = sorted((a for a in ours if a.kind == "KEYWORD_ONLY"), key=lambda a: order.get(a.name, len(order)))
    ours = [a for a in ours if a.kind != "KEYWORD_ONLY"] + keywords
    if "VAR_POSITIONAL" in kinds:
        assert {(a.name, a.default) for a in named} <= {(a.name, a.default) for a in ours}, where
        return
    for mine, yours in zip_longest(ours[: len(named)], named):
        relaxed = mine is not None and yours.default == "none given" and mine == yours._replace(default=mine.default)
        assert mine == yours or relaxed, where
    further = ours[len(named) :]
    required = {a.name for a in further if a.default == "none given"}
    assert required == REQUIRED.get(where, set()), f"{where} asks for more than it used to"
    if "VAR_KEYWORD" not in kinds:
        strange = {a.name for a in further} - ADDED.get(where.partition(".")[0], set()) - {"faithful"}
        assert not strange, f"{where} has further arguments {sorted(strange)}"
        assert not any(a.kind == "VAR_KEYWORD" for a in got), f"{where} takes any argument"


class Public(NamedTuple):
    """A name as the record has it. signatures: of a class's methods by their names, of a function under ""."""

    name: str
    kind: str
    signatures: dict[str, list[Argument]]
    fields: tuple[str, ...] = ()


def read(text: str) -> dict[str, list[Public]]:
    """The record, library by library."""
    found: dict[str, list[Public]] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        library = found.setdefault(section.split()[0], [])
        for line in section.splitlines():
            if match := re.match(r"- \*\*class (\w+)\*\*", line):
                library.append(Public(match[1], "class", {}))
            elif match := re.match(r"\s+(?:- )?`(\w+)(\(.*\))`", line):
                library[-1].signatures[match[1]] = parsed(match[2])
            elif match := re.match(r"- \*\*def (\w+)\*\*`(\(.*\))`", line):
                library.append(Public(match[1], "def", {"": parsed(match[2])}))
            elif match := re.match(r"- \*\*(\w+)\*\* namedtuple fields=(\(.*?\))", line):
                library.append(Public(match[1], "namedtuple", {}, ast.literal_eval(match[2])))
            elif match := re.match(r"- `(\w+)` \(submodule\)", line):
                library.append(Public(match[1], "submodule", {}))
    return found


@pytest.fixture(scope="module")
def record() -> dict[str, list[Public]]:
    path: Path = REFERENCE / "public_api.md"
    if not path.exists():
        pytest.skip("the record of the older libraries' public names is not here")
    return read(path.read_text())


@pytest.mark.parametrize("library", LIBRARIES)
def test_recorded_names(library: str, record: dict[str, list[Public]]) -> None:
    module, names = ours(library), record[library]
    assert len(names) >= 5
    for public in names:
        if public.kind == "submodule":
            assert (
                import_module(f"{REPLACEMENTS[library]}.{public.name}").__name__
                == f"{REPLACEMENTS[library]}.{public.name}"
            )
            continue
        held = getattr(module, public.name)
        if public.kind == "namedtuple":
            assert held._fields == public.fields
            assert held._field_defaults == {}
        for method, wanted in public.signatures.items():
            check(f"{library}.{public.name}.{method}", getattr(held, method) if method else held, wanted)


def test_the_record_is_read_whole(record: dict[str, list[Public]]) -> None:
    assert set(record) == set(LIBRARIES)
    classes = [public for names in record.values() for public in names if public.kind == "class"]
    assert len(classes) >= 27
    assert all("__init__" in public.signatures for public in classes)
    assert {public.kind for names in record.values() for public in names} == {"class", "def", "namedtuple", "submodule"}


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and not isinstance(value, ModuleType):
            yield name, value


@pytest.mark.parametrize("library", LIBRARIES)
def test_installed_names(library: str) -> None:
    """Against the package itself: constructors, forward, generate and whatever else its classes offer of their own."""
    theirs, module = original(library), ours(library)
    number = 0
    for name, value in public_names(theirs):
        held = getattr(module, name)
        if hasattr(value, "_fields"):
            assert held._fields == value._fields
        elif isinstance(value, type):
            offered = {"__init__", *(n for n in ("forward", "generate") if n in vars(value))}
            for method in offered & set(vars(value)):
                function = inspect.unwrap(getattr(value, method))
                if function.__qualname__.startswith(value.__name__):  # not what a decorator without a name made of it
                    check(f"{library}.{name}.{method}", getattr(held, method), arguments(function))
                    number += 1
        elif callable(value):
            check(f"{library}.{name}", held, arguments(value))
    assert number >= 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_inside(library: str) -> None:
    for submodule, names in INSIDE[library].items():
        module, theirs = import_module(f"{REPLACEMENTS[library]}.{submodule}"), original(f"{library}.{submodule}")
        for name in names:
            assert hasattr(theirs, name), f"{library}.{submodule} has no {name}"
            assert hasattr(module, name), f"longspan's {library}.{submodule} has no {name}"


def test_the_comparison_sees_differences() -> None:
    wanted = parsed("(self, dim, heads=8, *, mask: 'Tensor | None' = None, **kwargs)")
    assert [a.name for a in wanted] == ["self", "dim", "heads", "mask", "kwargs"]

    def same(self: Any, dim: int, heads: int = 8, *, mask: Any = None, more: int = 2) -> None: ...
    def other_default(self: Any, dim: int, heads: int = 4, *, mask: Any = None) -> None: ...
    def other_name(self: Any, dim: int, num_heads: int = 8, *, mask: Any = None) -> None: ...
    def other_kind(self: Any, dim: int, heads: int = 8, mask: Any = None) -> None: ...
    def needs_more(self: Any, dim: int, heads: int = 8, *, mask: Any = None, more: int) -> None: ...
    def asks_less(self: Any, dim: int = 3, heads: int = 8, *, mask: Any = None) -> None: ...
    def takes_more(self: Any, dim: int, heads: int = 8, more: int = 2) -> None: ...
    def takes_all(self: Any, dim: int, heads: int = 8, **kwargs: Any) -> None: ...

    for right in (same, asks_less):
        check("right", right, wanted)
    for wrong in (other_default, other_name, other_kind, needs_more):
        with pytest.raises(AssertionError):
            check("wrong", wrong, wanted)

    def lacks_one(self: Any, dim: int) -> None: ...

    for wrong in (takes_more, takes_all, lacks_one):
        with pytest.raises(AssertionError):
            check("wrong", wrong, parsed("(self, dim, heads=8)"))
