"""Bad input is refused with a text that says what was got, what is allowed and what to do."""

from __future__ import annotations

import pytest
import torch
from helpers import refused
from input_cases import ALL, B, D, H, S, T, build, inputs
from torch import nn

from longspan import Packing, Projection, build_mechanism


@ALL
def test_wrong_rank(name: str) -> None:
    q, k, v = inputs()
    with refused("q must have four dimensions (B, T, H, D)", "got (2, 17, 15)"):
        build(name)(q.flatten(2), k, v)
    with refused("v must have four dimensions (B, S, Hkv, E)", "got (17, 3, 7)"):
        build(name)(q, k, v[0])


@ALL
def test_swapped_heads_and_length(name: str) -> None:
    q, k, v = inputs()
    with refused("k must be (B, S, Hkv, D) with 3 heads of 5", "got (2, 3, 17, 5)", "swapped", "heads come third"):
        build(name)(q, k.transpose(1, 2), v)


def test_wrong_heads_or_width() -> None:
    q, k, v = inputs()
    with refused("v must be (B, S, Hkv, E) with 3 heads of 7", "got (2, 17, 3, 5)"):
        build("linear")(q, k, k)
    with refused("q must be (B, T, H, D) with 3 heads of 5", "got (2, 17, 2, 5)"):
        build("linear")(q[:, :, :2], k, v)


@ALL
def test_not_a_tensor(name: str) -> None:
    q, k, v = inputs()
    with refused("k must be a tensor of shape (B, S, Hkv, D)", "got None"):
        build(name)(q, None, v)


@ALL
def test_dtype_mismatch(name: str) -> None:
    q, k, v = inputs()
    with refused("one dtype", "v of torch.float64 beside torch.float32"):
        build(name)(q, k, v.double())
    with refused("one dtype", "k of torch.bfloat16 beside torch.float32"):
        build(name)(q, k.bfloat16(), v, causal=True)


@ALL
def test_integers(name: str) -> None:
    q, k, v = inputs()
    with refused("q must be floating point", "got torch.int64"):
        build(name)(q.long(), k.long(), v.long())


@ALL
def test_device_mismatch(name: str) -> None:
    q, k, v = inputs()
    with refused("one device", "k on meta beside cpu"):
        build(name)(q, k.to("meta"), v)
    with refused("key_mask must be on the keys' device cpu", "got meta"):
        build(name)(q, k, v, key_mask=torch.ones(B, T, dtype=torch.bool, device="meta"))
    offsets = Packing.from_lengths([5, 12], device="meta")
    with refused("packing.offsets must be on the inputs' device cpu", "got meta"):
        build(name)(q[:1], k[:1], v[:1], packing=offsets)


def test_disagreeing_lengths_and_batches() -> None:
    q, k, v = inputs()
    mechanism = build("linear")
    with refused("k and v must agree in batch and length", "k (2, 17) and v (2, 11)"):
        mechanism(q, k, v[:, :11])
    with refused("q and k must have one batch size", "got 1 and 2"):
        mechanism(q[:1], k, v)


@ALL
def test_key_mask_shape_and_dtype(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs()
    with refused("key_mask must be (B, S) = (2, 17)", "got (2, 11)"):
        mechanism(q, k, v, key_mask=torch.ones(B, 11, dtype=torch.bool))
    with refused("key_mask must be bool, True = keep", "got torch.float32", "key_mask.bool()"):
        mechanism(q, k, v, key_mask=torch.ones(B, T))
    with refused("key_mask must be (B, S) = (2, 17)", "got (2, 17, 17)", "masks over (T, S) pairs are not supported"):
        mechanism(q, k, v, key_mask=torch.ones(B, T, T, dtype=torch.bool))
    with refused("key_mask must be (B, S) = (2, 17)", "got (17, 17)"):
        mechanism(q, k, v, key_mask=torch.ones(T, T, dtype=torch.bool))


@ALL
def test_hole_in_a_causal_mask(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs()
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 5] = False
    says = "each row of key_mask must be one run of True", "drop the tokens in between"
    with refused(*says):
        mechanism(q, k, v, causal=True, key_mask=mask)
    with refused(*says):
        mechanism.extend(mechanism.new_state(B), q, k, v, key_mask=mask)
    if mechanism.supports_cross:
        assert mechanism.write(mechanism.new_state(B), k, v, key_mask=mask).length.tolist() == [T, T - 1]
    else:
        with refused(*says):
            mechanism.write(mechanism.new_state(B), k, v, key_mask=mask)
    assert mechanism(q, k, v, key_mask=mask).isfinite().all(), "a bidirectional mask may have holes"


@pytest.mark.parametrize("window", [0, -3])
def test_window_not_positive(window: int) -> None:
    with refused("window counts the query's own key and must be at least 1", f"got {window}"):
        build("local", window=window)


def test_other_windows() -> None:
    with refused("window must be a number of keys or (back, ahead), neither negative", "got (-1, 2)"):
        build("local", window=(-1, 2))
    with refused("window must be a number of keys or (back, ahead)", "got (1, 2, 3)"):
        build("local", window=(1, 2, 3))
    with refused("look_back and look_ahead must not be negative", "got -1 and None"):
        build("local", window=4, look_back=-1)
    with refused("look_back and look_ahead go with a block size: window must be one number", "got (2, 2)"):
        build("local", window=(2, 2), look_back=1)
    with refused("a bias table has shape (H, P, (back + 1 + ahead)·P), here (3, 4, 8)", "got (3, 4, 4)"):
        build("local", window=4, look_back=1, bias=torch.zeros(3, 4, 4))
    with refused("bias must be a module of distances, a tensor or None", "got 'learned'"):
        build("local", window=4, bias="learned")


@ALL
def test_causal_with_other_lengths(name: str) -> None:
    q, k, v = inputs(keys=S)
    with refused("causal attention needs as many queries as keys", "got 17 and 19", "past=state"):
        build(name)(q, k, v, causal=True)
    mechanism = build(name)
    with refused("causal attention needs as many queries as keys", "got 17 and 19"):
        mechanism.extend(mechanism.new_state(B), q, k, v)


@ALL
def test_past_without_causal(name: str) -> None:
    mechanism = build(name)
    with refused("past means causal attention: pass causal=True"):
        mechanism(*inputs(), past=mechanism.new_state(B))


@ALL
def test_packing_with_key_mask(name: str) -> None:
    packing, mask = Packing.from_lengths([5, 12]), torch.ones(1, T, dtype=torch.bool)
    with refused("packing and key_mask exclude each other", "leave key_mask out"):
        build(name)(*inputs(1), packing=packing, key_mask=mask)


@ALL
def test_packing_with_a_batch(name: str) -> None:
    with refused("packed sequences share one row: batch size must be 1 with packing", "got 2"):
        build(name)(*inputs(2), packing=Packing.from_lengths([5, 12]))


@pytest.mark.parametrize(
    ("offsets", "max_length", "says"),
    [
        ([0, 5, 16], 11, ("must rise from 0 to the row's length 17", "got [0, 5, 16]")),
        ([1, 5, 17], 12, ("must rise from 0 to the row's length 17", "got [1, 5, 17]")),
        ([0, 12, 5, 17], 12, ("must rise from 0 to the row's length 17", "got [0, 12, 5, 17]")),
        ([0, 5, 17], 11, ("packing.max_length is 11, but a sequence has 12 tokens",)),
        ([0], 17, ("packing.offsets must be (N + 1,) int32", "got (1,)", "Packing.from_lengths")),
    ],
)
def test_bad_offsets(offsets: list[int], max_length: int, says: tuple[str, ...]) -> None:
    packing = Packing(torch.tensor(offsets, dtype=torch.int32), max_length)
    with refused(*says):
        build("linear")(*inputs(1), packing=packing)


def test_offsets_of_another_dtype() -> None:
    with refused("packing.offsets must be (N + 1,) int32", "got (3,) torch.int64", "Packing.from_lengths makes them"):
        build("linear")(*inputs(1), packing=Packing(torch.tensor([0, 5, 17]), 12))


@pytest.mark.parametrize("lengths", [[], [4, -1]])
def test_bad_lengths(lengths: list[int]) -> None:
    with refused("lengths must be one or more non-negative integers", str(lengths)):
        Packing.from_lengths(lengths)


def test_lengths_may_be_a_tensor() -> None:
    assert type(Packing.from_lengths(torch.tensor([5, 12])).max_length) is int


def test_key_packing() -> None:
    q, k, v = inputs(1, keys=S)
    two, three = Packing.from_lengths([5, 12]), Packing.from_lengths([5, 7, 7])
    mechanism = build("linear")
    with refused("key_packing needs packing for the queries too"):
        mechanism(q, k, v, key_packing=three)
    with refused("packing and key_packing must hold as many sequences", "got 2 and 3"):
        mechanism(q, k, v, packing=two, key_packing=three)
    with refused("queries (17) and keys (19) are packed differently", "pass key_packing"):
        mechanism(q, k, v, packing=two)
    with refused("key_packing.offsets must rise from 0 to the row's length 19", "got [0, 5, 17]"):
        mechanism(q, k, v, packing=two, key_packing=two)
    with refused("causal attention has one packing for queries and keys", "leave key_packing out"):
        mechanism(*inputs(1), causal=True, packing=two, key_packing=two)


@pytest.mark.parametrize("name", ["local", "split"])
def test_local_cross_attention(name: str) -> None:
    with refused("cannot attend to another row", "(got 17 queries and 19 keys)", "use linear, performer"):
        build(name)(*inputs(keys=S))
    two = Packing.from_lengths([5, 12])
    with refused("cannot attend to another row"):
        build(name)(*inputs(1), packing=two, key_packing=two)


@ALL
def test_wrong_state_class(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs()
    other = build("local" if name == "softmax" else "softmax").new_state(B)
    says = f"{type(mechanism).__name__} needs a", "from its new_state()", f"got a {type(other).__name__}"
    for call in (
        lambda: mechanism(q, k, v, causal=True, past=other),
        lambda: mechanism.extend(other, q, k, v),
        lambda: mechanism.write(other, k, v),
        lambda: mechanism.read(other, q),
        lambda: mechanism.step(other, q[:, :1], k[:, :1], v[:, :1]),
    ):
        with refused(*says):
            call()
    with refused("needs a", "got None"):
        mechanism.read(None, q)


def test_wrong_state_inside_a_split() -> None:
    mechanism = build("split")
    state = mechanism.new_state(B)
    state.parts = (state.parts[1], state.parts[1])
    with refused("LocalAttention needs a LocalState", "got a LinearState"):
        mechanism.read(state, inputs()[0])


@ALL
def test_wrong_state_batch(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs()
    state = mechanism.new_state(3)
    for call in (
        lambda: mechanism(q, k, v, causal=True, past=state),
        lambda: mechanism.extend(state, q, k, v),
        lambda: mechanism.write(state, k, v),
        lambda: mechanism.read(state, q),
    ):
        with refused("the state holds 3 sequences, the input 2"):
            call()
    with refused("the state holds 3 sequences, the input 2"):
        mechanism.extend(state, q[:1], k[:1], v[:1], packing=Packing.from_lengths([5, 12]))


def test_state_rows_of_another_class() -> None:
    linear, local = build("linear").new_state(2), build("local").new_state(1)
    with refused("rows must be a LinearState", "got a LocalState"):
        linear.put([0], local)


def test_stale_draw() -> None:
    mechanism, (q, k, v) = build("performer"), inputs()
    state = mechanism.write(mechanism.new_state(B), k, v)
    mechanism.redraw()
    says = "written with draw 0 of the random features", "now has draw 1", "start from new_state()"
    with refused(*says):
        mechanism.read(state, q)
    with refused(*says):
        mechanism(q, k, v, causal=True, past=state)
    with refused("these states differ in draw: 0 and 1"):
        state.put([0], mechanism.new_state(1))
    split = build("split", parts=[{"mechanism": "performer", "num_heads": 3}])
    mixture = build("mixture", memory={"mechanism": "performer", "kernel": "relu"})
    for whole, part in ((split, split.parts[0]), (mixture, mixture.memory)):
        held = whole.new_state(B)
        part.redraw()
        with refused(*says):
            whole.read(held, q)


def test_linformer_beyond_its_table() -> None:
    mechanism = build("linformer", max_length=13)
    q, k, v = inputs()
    says = "17 tokens are more than this projection's max_length of 13", "a larger max_length", "periodic=True"
    with refused(*says):
        mechanism(q, k, v)
    with refused(*says):
        mechanism(q, k, v, causal=True)
    with refused(*says):
        mechanism.new_state(B, max_length=17)
    _, state = mechanism.extend(mechanism.new_state(B), q[:, :11], k[:, :11], v[:, :11])
    with refused(*says):
        mechanism.extend(state, q[:, 11:], k[:, 11:], v[:, 11:])
    with refused(*says):
        mechanism.write(state, k[:, 11:], v[:, 11:])
    state = mechanism.write(state, k[:, 11:13], v[:, 11:13])
    with refused("14 tokens are more than", "max_length of 13"):
        mechanism.step(state, q[:, :1], k[:, :1], v[:, :1])


def test_linformer_padding_does_not_count() -> None:
    """What is refused is tokens beyond the table, not slots."""
    mechanism = build("linformer", max_length=13)
    q, k, v = inputs()
    mask = (torch.arange(T) >= 6).expand(B, T)
    _, state = mechanism.extend(mechanism.new_state(B), q, k, v, key_mask=mask)
    assert state.length.tolist() == [11, 11]


@ALL
def test_step_with_two_tokens(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs(queries=2)
    with refused("step takes one token, q of shape (B, 1, H, D)", "got (2, 2, 3, 5)", "use extend"):
        mechanism.step(mechanism.new_state(B), q, k, v)
    with refused("causal attention needs as many queries as keys", "got 1 and 2"):
        mechanism.step(mechanism.new_state(B), q[:, :1], k, v)


def test_softmax_state_full() -> None:
    mechanism, (q, k, v) = build("softmax"), inputs()
    state = mechanism.write(mechanism.new_state(B, max_length=17), k, v)
    with refused("a state made with max_length=17 is full", "make it larger, or leave max_length out"):
        mechanism.step(state, q[:, :1], k[:, :1], v[:, :1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_heads": 0}, ("num_heads must be a positive integer", "got 0")),
        ({"head_dim": 2.5}, ("head_dim must be a positive integer", "got 2.5")),
        ({"value_dim": -7}, ("value_dim must be a positive integer", "got -7")),
        ({"num_kv_heads": 2}, ("num_heads (3) must be a multiple of num_kv_heads (2)",)),
    ],
)
def test_bad_sizes(arguments: dict, says: tuple[str, ...]) -> None:
    with refused(*says):
        build_mechanism("linear", **({"num_heads": H, "head_dim": D} | arguments))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("softmax", {"dropout": 1.0}, ("dropout must be in [0, 1)", "got 1.0")),
        ("local", {"dropout": -0.1}, ("dropout must be in [0, 1)", "got -0.1")),
        ("local", {"xpos": 3.0}, ("xpos needs a positive scale base and an even head_dim", "got 3.0 and 5")),
        ("linformer", {"dropout": 2}, ("dropout must be in [0, 1)", "got 2")),
        ("linear", {"blind_spot": 0}, ("blind_spot must be at least 1", "got 0")),
        ("local", {"window": 3.5}, ("window must be a number of keys or (back, ahead)", "got 3.5")),
        ("linear", {"feature_map": "softmax", "normalize": "none"}, ("exponentials", 'use normalize="query"')),
        ("performer", {"epsilon": 1e-4, "normalize": "feature"}, ("with an epsilon needs normalize",)),
        ("performer", {"epsilon": -1e-4}, ("epsilon must not be negative", "got -0.0001")),
        ("performer", {"kernel": "exp", "epsilon": -1.0}, ("epsilon must not be negative", "got -1.0")),
        ("performer", {"kernel": nn.ReLU}, ("kernel must be a name or a function", "nn.ReLU()", "got <class")),
        ("performer", {"kernel": 3}, ("kernel must be a name or a function", "got 3")),
        ("performer", {"num_features": 0}, ("num_features must be positive", "got 0")),
        ("performer", {"num_features": 8, "projection": False}, ("needs projection=True", "got 8")),
        ("performer", {"epsilon": 0.1, "projection": False}, ("epsilon belongs to random features", "got 0.1")),
        ("performer", {"redraw_interval": 0}, ("redraw_interval must be positive, or None for never", "got 0")),
        ("linformer", {"rank": 0}, ("rank and max_length must be positive", "got 0 and 41")),
        (
            "linformer",
            {"projection": "convolution", "periodic": True},
            ("a convolution needs dim, and is not periodic",),
        ),
        (
            "linformer",
            {"projection": "convolution", "share_projection": True},
            ("a shared convolution needs value_dim (7) = head_dim (5)",),
        ),
        ("linformer", {"projection": Projection(3, 41, num_heads=2)}, ("tables for 2 heads, this mechanism 3",)),
        (
            "linformer",
            {"projection": Projection(2, 41), "rank": 3},
            ("rank=3 contradicts the projection, which has rank=2", "leave rank out"),
        ),
        (
            "linformer",
            {"projection": Projection(3, 41), "bias": True},
            ("bias=True contradicts the projection, which has bias=False",),
        ),
        (
            "linformer",
            {"projection": Projection(3, 41, kind="convolution", dim=5)},
            ("convolution takes dim 5", "got head_dim 5 and value_dim 7"),
        ),
        ("split", {"parts": ()}, ("the parts' heads [] must add up to num_heads (3)",)),
        ("split", {"parts": [{"mechanism": "linear"}]}, ('a part is {"mechanism": name, "num_heads": heads',)),
        (
            "split",
            {"parts": [{"mechanism": "linear", "num_heads": 2}]},
            ("the parts' heads [2] must add up to num_heads (3)",),
        ),
    ],
)
def test_bad_options(name: str, options: dict, says: tuple[str, ...]) -> None:
    with refused(*says):
        build(name, **options)


def test_a_blind_spot_of_half_a_token_is_refused() -> None:
    with refused("blind_spot must be an integer, got 2.5", error=TypeError):
        build("linear", blind_spot=2.5)


def test_split_inside_a_group_of_heads() -> None:
    parts = [{"mechanism": "linear", "num_heads": 3}, {"mechanism": "linear", "num_heads": 1}]
    with refused("with 2 key/value heads each part must have a multiple of 2 heads", "got [3, 1]"):
        build_mechanism("split", 4, D, num_kv_heads=2, parts=parts)


@pytest.mark.parametrize("index", [{}, object, "x", None])
def test_an_index_of_rows_that_is_none_is_refused(index) -> None:
    state = build_mechanism("linear", 2, 3).new_state(5)
    for call in (lambda: state.select(index), lambda: state.put(index, state)):
        with pytest.raises(ValueError, match="index must be row numbers"):
            call()


def test_masks_packings_and_queries_of_other_types_are_refused() -> None:
    mechanism, x = build_mechanism("linear", 2, 3), torch.zeros(1, 5, 2, 3)
    for options, message in (({"key_mask": {}}, "key_mask must be a bool tensor"), ({"packing": {}}, "be a Packing")):
        with pytest.raises(TypeError, match=message):
            mechanism(x, x, x, **options)
    with pytest.raises(ValueError, match="q must be a tensor"):
        mechanism.step(mechanism.new_state(1), "", x[:, :1], x[:, :1])
