"""The registry: names, errors for wrong ones, plug-ins, and a mechanism of one class and one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import AttentionConfig, FeatureMap, Mechanism, build_mechanism, list_mechanisms, register_mechanism
from longspan import mechanisms as registry
from longspan.mechanisms import _REGISTRY, mechanism_options
from longspan.mechanisms.linear import LinearAttention
from longspan.testing import check_mechanism

B, T, H, D, E = 2, 17, 3, 5, 7
BUILT_IN = list(_REGISTRY)


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


def split_of(*names: str) -> Mechanism:
    return build_mechanism("split", len(names), D, parts=[{"mechanism": name, "num_heads": 1} for name in names])


def test_every_mechanism_has_its_file() -> None:
    for name, cls in list_mechanisms().items():
        assert issubclass(cls, Mechanism)
        assert cls.__module__ == f"longspan.mechanisms.{name}", "one file each, named after it"


def test_list_mechanisms_returns_a_copy() -> None:
    list_mechanisms().clear()
    assert list(list_mechanisms()) == BUILT_IN


def test_flags() -> None:
    built = {name: build_mechanism(name, H, D) for name in BUILT_IN if name != "split"}
    assert all(mechanism.supports_causal for mechanism in built.values())
    assert [name for name, mechanism in built.items() if not mechanism.supports_cross] == [
        "local",
        "decay",
        "delta",
        "mixture",
    ]
    assert split_of("linear", "performer", "softmax").supports_cross
    assert split_of("linear", "performer", "linformer").supports_causal
    assert not split_of("linear", "local").supports_cross
    assert split_of("linear", "local").supports_causal


def test_a_split_is_causal_only_if_its_parts_are() -> None:
    class Bidirectional(LinearAttention):
        supports_causal = False

    register_mechanism("bidirectional", Bidirectional)
    mixed = split_of("linear", "bidirectional")
    assert not mixed.supports_causal
    x = torch.randn(B, T, 2, D)
    with pytest.raises(ValueError, match=r"SplitAttention cannot be causal; use another mechanism or causal=False"):
        mixed(x, x, x, causal=True)


def test_a_split_inside_a_split() -> None:
    inner = [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "linear", "num_heads": 1}]
    parts = [{"mechanism": "split", "num_heads": 2, "parts": inner}, {"mechanism": "performer", "num_heads": 1}]
    nested = build_mechanism("split", H, D, parts=parts).eval()
    assert not nested.supports_cross
    x = torch.randn(B, T, H, D)
    out = nested(x, x, x, causal=True)
    direct = build_mechanism("local", 1, D, window=3)(*[x[:, :, :1]] * 3, causal=True)
    torch.testing.assert_close(out[:, :, :1], direct)
    _, state = nested.extend(nested.new_state(B), *[x[:, :9]] * 3)
    torch.testing.assert_close(nested(*[x[:, 9:]] * 3, causal=True, past=state), out[:, 9:])


@pytest.mark.parametrize(
    ("given", "meant"),
    [("preformer", "performer"), ("lineer", "linear"), ("Softmax", "softmax"), ("linforme", "linformer")],
)
def test_wrong_name(given: str, meant: str) -> None:
    says = f"unknown mechanism {given!r}; there is {', '.join(BUILT_IN)} (did you mean {meant!r}?)"
    with pytest.raises(ValueError, match=re.escape(says)):
        build_mechanism(given, H, D)
    with pytest.raises(ValueError, match=re.escape(says)):
        mechanism_options(given)


def test_a_name_like_nothing_gets_no_guess() -> None:
    with pytest.raises(ValueError, match=r"unknown mechanism 'zzz'; there is softmax.*mixture$"):
        build_mechanism("zzz", H, D)


@pytest.mark.parametrize(
    ("name", "option", "meant"),
    [
        ("local", "windows", "window"),
        ("performer", "nb_features", "num_features"),
        ("linformer", "ranks", "rank"),
        ("linear", "blindspot", "blind_spot"),
        ("softmax", "drop_out", "dropout"),
        ("split", "part", "parts"),
    ],
)
def test_wrong_option(name: str, option: str, meant: str) -> None:
    options = ", ".join(mechanism_options(name))
    says = f"{name} has no option {option!r}; it has {options} (did you mean {meant!r}?)"
    with pytest.raises(ValueError, match=re.escape(says)):
        build_mechanism(name, H, D, **{option: 3})


def test_wrong_option_inside_a_split() -> None:
    with pytest.raises(ValueError, match=r"local has no option 'windw'.*did you mean 'window'"):
        build_mechanism("split", H, D, parts=[{"mechanism": "local", "num_heads": 3, "windw": 4}])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "linear",
            {"feature_map": "elu1"},
            "unknown feature_map 'elu1'; there is elu, relu, identity, softmax, hedgehog (did",
        ),
        ("linear", {"normalize": "querys"}, "unknown normalize 'querys'; there is query, feature, none (did you mean"),
        (
            "linear",
            {"first_bucket": "zeros"},
            "unknown first_bucket 'zeros'; there is causal, zero (did you mean",
        ),
        ("performer", {"kernel": "reelu"}, "unknown kernel 'reelu'; there is softmax, relu"),
        ("performer", {"row_norms": "units"}, "unknown row_norms 'units'; there is sampled, unit (did you mean 'unit'"),
        ("linformer", {"projection": "conv"}, "unknown projection 'conv'; there is learned, random, convolution"),
    ],
)
def test_wrong_choice(name: str, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        build_mechanism(name, H, D, **options)


def test_options_and_their_defaults() -> None:
    assert mechanism_options("softmax") == {"scale": None, "dropout": 0.0}
    assert mechanism_options("local")["window"] == 256
    for name in BUILT_IN:
        assert not {"num_heads", "head_dim", "num_kv_heads", "value_dim", "self"} & set(mechanism_options(name))


def test_register_refuses() -> None:
    with pytest.raises(ValueError, match=r"a mechanism is a subclass of longspan.Mechanism, got .*Linear"):
        register_mechanism("dense", nn.Linear)
    with pytest.raises(ValueError, match=r"got 'linear'"):
        register_mechanism("dense", "linear")
    with pytest.raises(ValueError, match=r"'linear' is LinearAttention already; choose another name"):
        register_mechanism("linear", list_mechanisms()["softmax"])
    assert list(list_mechanisms()) == BUILT_IN


def test_registering_twice_is_harmless() -> None:
    register_mechanism("linear", list_mechanisms()["linear"])
    assert list(list_mechanisms()) == BUILT_IN


@pytest.mark.parametrize("name", ["softmax", "linear", "performer"])
def test_built_in_mechanisms_obey_the_laws(name: str) -> None:
    check_mechanism(list_mechanisms()[name])


def test_the_mechanism_of_the_guide() -> None:
    """The block of docs/extending.md: one class, one line, and the laws hold."""
    text = (Path(longspan.__file__).parents[1] / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.rstrip().endswith('register_mechanism("mean", MeanAttention)')]
    exec(compile(block, "extending.md", "exec", dont_inherit=True), {"__name__": "extending"})
    assert list(list_mechanisms()) == [*BUILT_IN, "mean"]
    check_mechanism(list_mechanisms()["mean"])
    mean = build_mechanism("mean", 1, D).double()
    x = torch.randn(1, T, 1, D, dtype=torch.float64)
    torch.testing.assert_close(mean(x, x, x), x.mean(1, keepdim=True).expand_as(x))
    with pytest.raises(ValueError, match=r"mean has no option 'window'; it has none"):
        build_mechanism("mean", 1, D, window=3)
    with pytest.raises(ValueError, match=r"there is softmax, .*, mean \(did you mean 'mean'\?\)"):
        build_mechanism("meen", 1, D)
    parts = [{"mechanism": "mean", "num_heads": 2}, {"mechanism": "linear", "num_heads": 1}]
    split = build_mechanism("split", H, D, parts=parts)
    assert split(*[torch.randn(B, T, H, D)] * 3, causal=True).shape == (B, T, H, D)


class Squares(FeatureMap):
    """x² and a constant."""

    def num_features(self, head_dim: int) -> int:
        return head_dim + 1

    def query(self, q: Tensor) -> Tensor:
        return torch.cat([q.square(), torch.ones_like(q[..., :1])], -1)

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.query(k), None


class SquaresAttention(LinearAttention):
    """A mechanism that is `linear` with one map."""

    def __init__(self, num_heads: int, head_dim: int, *, num_kv_heads=None, value_dim=None, output_scale=1.0) -> None:
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads=num_kv_heads,
            value_dim=value_dim,
            feature_map=Squares(),
            output_scale=output_scale,
        )


def test_a_mechanism_made_from_another() -> None:
    register_mechanism("squares", SquaresAttention)
    assert mechanism_options("squares") == {"output_scale": 1.0}
    check_mechanism(lambda: SquaresAttention(6, D, num_kv_heads=3, value_dim=E, output_scale=0.5))


class _Point:
    """An entry point."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, f"package:{value}"
        self._loaded = value

    def load(self) -> object:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Point]]:
    points: list[_Point] = []
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points if group == "longspan.mechanisms" else [])
    registry._plugins.cache_clear()
    yield points
    registry._plugins.cache_clear()


def test_a_plug_in_is_loaded_when_its_name_is_used(plugins: list[_Point]) -> None:
    plugins.append(_Point("squares", SquaresAttention))
    assert "squares" not in _REGISTRY
    assert isinstance(build_mechanism("squares", 1, D), SquaresAttention)
    assert list(list_mechanisms()) == [*BUILT_IN, "squares"]
    assert AttentionConfig(mechanism="squares").mechanism == "squares"
    with pytest.raises(ValueError, match=r"unknown mechanism 'square'; there is .*, squares \(did you mean 'squares'"):
        build_mechanism("square", 1, D)


def test_a_broken_plug_in_is_named(plugins: list[_Point]) -> None:
    plugins += [_Point("broken", ImportError("no module named x")), _Point("odd", nn.Linear)]
    with pytest.raises(ImportError, match=r"the plug-in package:.* for mechanism 'broken' cannot be loaded: no module"):
        build_mechanism("broken", 1, D)
    with pytest.raises(ImportError, match=r"'odd' cannot be loaded: a mechanism is a subclass of longspan.Mechanism"):
        build_mechanism("odd", 1, D)
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert list(list_mechanisms()) == BUILT_IN


def test_a_plug_in_cannot_take_a_built_in_name(plugins: list[_Point]) -> None:
    plugins.append(_Point("linear", SquaresAttention))
    with pytest.warns(UserWarning, match=r"is ignored: 'linear' is a built-in mechanism"):
        assert list_mechanisms()["linear"] is LinearAttention
