"""The registry: what exists, what wrong names are answered with, and a seventh mechanism in one file and one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import FeatureMap, Mechanism, Packing, build_mechanism, mechanisms, register_mechanism
from longspan.mechanisms import _REGISTRY, mechanism_options
from longspan.mechanisms.linear import LinearAttention

B, T, H, D, E = 2, 17, 3, 5, 7
SIX = ["softmax", "local", "linear", "performer", "linformer", "split"]


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


def split_of(*names: str) -> Mechanism:
    return build_mechanism("split", len(names), D, parts=[{"mechanism": name, "num_heads": 1} for name in names])


def test_the_six() -> None:
    assert list(mechanisms()) == SIX
    for name, cls in mechanisms().items():
        assert issubclass(cls, Mechanism)
        assert cls.__module__ == f"longspan.mechanisms.{name}", "one file each, named after it"


def test_mechanisms_gives_a_copy() -> None:
    mechanisms().clear()
    assert list(mechanisms()) == SIX


def test_flags() -> None:
    built = {name: build_mechanism(name, H, D) for name in SIX if name != "split"}
    assert all(mechanism.supports_causal for mechanism in built.values())
    assert [name for name, mechanism in built.items() if not mechanism.supports_cross] == ["local"]
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
    says = f"unknown mechanism {given!r}; there is {', '.join(SIX)} (did you mean {meant!r}?)"
    with pytest.raises(ValueError, match=re.escape(says)):
        build_mechanism(given, H, D)
    with pytest.raises(ValueError, match=re.escape(says)):
        mechanism_options(given)


def test_a_name_like_nothing_gets_no_guess() -> None:
    with pytest.raises(ValueError, match=r"unknown mechanism 'zzz'; there is softmax.*split$"):
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
            "unknown feature_map 'elu1'; there is elu, relu, identity, softmax (did",
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
    for name in SIX:
        assert not {"num_heads", "head_dim", "num_kv_heads", "value_dim", "self"} & set(mechanism_options(name))


def test_register_refuses() -> None:
    with pytest.raises(ValueError, match=r"a mechanism is a subclass of longspan.Mechanism, got .*Linear"):
        register_mechanism("dense", nn.Linear)
    with pytest.raises(ValueError, match=r"got 'linear'"):
        register_mechanism("dense", "linear")
    with pytest.raises(ValueError, match=r"'linear' is LinearAttention already; choose another name"):
        register_mechanism("linear", mechanisms()["softmax"])
    assert list(mechanisms()) == SIX


def test_registering_twice_is_harmless() -> None:
    register_mechanism("linear", mechanisms()["linear"])
    assert list(mechanisms()) == SIX


def check_laws(name: str, **options: object) -> None:
    """The laws that a mechanism without dropout and randomness must keep, in float64."""
    mechanism = build_mechanism(name, 2 * H, D, num_kv_heads=H, value_dim=E, **options).double().eval()
    q, k, v = (torch.randn(B, T, *size, dtype=torch.float64) for size in ((2 * H, D), (H, D), (H, E)))
    out = mechanism(q, k, v, causal=True)
    assert out.shape == (B, T, 2 * H, E)

    def same(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)

    state = mechanism.new_state(B, max_length=T, dtype=torch.float64)
    for t in range(T):
        x, state = mechanism.step(state, *(y[:, t : t + 1] for y in (q, k, v)))
        same(x, out[:, t : t + 1])
    first, state = mechanism.extend(mechanism.new_state(B, dtype=torch.float64), q[:, :6], k[:, :6], v[:, :6])
    same(first, out[:, :6])
    same(mechanism(q[:, 6:], k[:, 6:], v[:, 6:], causal=True, past=state), out[:, 6:])

    future = v.clone()
    future[:, 9:] += 1
    assert torch.equal(mechanism(q, k, future, causal=True)[:, :9], out[:, :9])

    written = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    same(mechanism.read(written, q), mechanism(q, k, v))
    same(mechanism.read(written.select([1, 0, 1]), q[[1, 0, 1]]), mechanism(q, k, v)[[1, 0, 1]])

    mask = torch.arange(T) < torch.tensor([[T], [11]])
    hidden = [x.masked_fill(~mask[:, :, None, None], float("nan")) for x in (k, v)]
    same(mechanism(q, *hidden, key_mask=mask)[1:, :11], mechanism(q[1:, :11], k[1:, :11], v[1:, :11]))
    same(mechanism(q, *hidden, key_mask=mask, causal=True)[1:, :11], out[1:, :11])

    rows = [torch.cat([x[0], x[1, :11]])[None] for x in (q, k, v)]
    packed = mechanism(*rows, causal=True, packing=Packing.from_lengths([T, 11]))
    same(packed[0], torch.cat([out[0], out[1, :11]]))

    nothing = mechanism(q, k, v, key_mask=torch.zeros(B, T, dtype=torch.bool))
    assert (nothing == 0).all()


@pytest.mark.parametrize("name", ["softmax", "linear", "performer"])
def test_these_laws_hold_for_built_in_mechanisms(name: str) -> None:
    check_laws(name)


def test_the_seventh_mechanism_of_contributing() -> None:
    """The very block that CONTRIBUTING shows: one file, one line, and the laws run."""
    text = (Path(longspan.__file__).parents[1] / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block.rstrip().endswith('register_mechanism("mean", MeanAttention)')
    exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), {"__name__": "contributing"})
    assert list(mechanisms()) == [*SIX, "mean"]
    check_laws("mean")
    mean = build_mechanism("mean", 1, D).double()
    x = torch.randn(1, T, 1, D, dtype=torch.float64)
    torch.testing.assert_close(mean(x, x, x), x.mean(1, keepdim=True).expand_as(x))
    with pytest.raises(ValueError, match=r"mean has no option 'window'; it has none"):
        build_mechanism("mean", 1, D, window=3)
    with pytest.raises(ValueError, match=r"there is softmax, .*, mean \(did you mean 'mean'\?\)"):
        build_mechanism("meen", 1, D)
    parts = [{"mechanism": "mean", "num_heads": 2}, {"mechanism": "linear", "num_heads": 1}]
    assert build_mechanism("split", H, D, parts=parts)(*[torch.randn(B, T, H, D)] * 3, causal=True).shape == (
        B,
        T,
        H,
        D,
    )


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
    check_laws("squares", output_scale=0.5)
