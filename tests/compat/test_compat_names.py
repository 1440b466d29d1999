"""A module under an older library's names: what it writes, what it takes, what it says when they do not fit."""

import pytest
import torch
from torch import nn

from longspan.compat.state_dict import CompatModule, KeyMapping, concatenate, constant, rename_layer, reshape


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.to_kv = nn.Linear(3, 8, bias=False)
        self.table = nn.Parameter(torch.randn(5, 3))


class Older(CompatModule):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.shapes = None

    def key_mappings(self):
        yield from rename_layer("layers.0.norm", "norm")
        yield KeyMapping(
            ("layers.0.k.weight", "layers.0.v.weight"),
            ("to_kv.weight",),
            lambda x: [torch.cat(list(x), 0)],
            lambda x: x[0].split([2, 6]),
            aliases=(("twin.k.weight", "twin.v.weight"),),
        )
        yield reshape("emb.weights.0", "table", (1, 5, 1, 3))
        yield constant("inv_freq", lambda: torch.arange(2.0))

    def upgrade_key(self, key):
        return key.replace("weights_", "weights.")

    def adapt_to_checkpoint(self, shapes):
        self.shapes = dict(shapes)


NAMES = {
    "layers.0.norm.weight",
    "layers.0.norm.bias",
    "layers.0.k.weight",
    "layers.0.v.weight",
    "twin.k.weight",
    "twin.v.weight",
    "emb.weights.0",
    "inv_freq",
}


@pytest.mark.parametrize("prefix", ["", "net."])
def test_round_trip_also_inside_another_module(prefix):
    older, other = Older(), Older()
    if prefix:
        older, other = nn.ModuleDict({"net": older}), nn.ModuleDict({"net": other})
    held = older.state_dict()
    assert set(held) == {prefix + name for name in NAMES}
    assert held[f"{prefix}emb.weights.0"].shape == (1, 5, 1, 3)
    other.load_state_dict(held)
    for mine, yours in zip(older.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_either_copy_will_do_and_constants_are_not_needed():
    older, other = Older(), Older()
    for gone in ("layers.0", "twin"):
        held = {k: v for k, v in older.state_dict().items() if not k.startswith((f"{gone}.k", f"{gone}.v", "inv_"))}
        other.load_state_dict(held)
        assert torch.equal(older.model.to_kv.weight, other.model.to_kv.weight)


def test_names_of_other_releases():
    older, other = Older(), Older()
    held = {name.replace("weights.", "weights_"): tensor for name, tensor in older.state_dict().items()}
    other.load_state_dict(held)
    assert torch.equal(older.model.table, other.model.table)
    assert other.shapes["emb.weights.0"] == (1, 5, 1, 3)


def test_what_does_not_fit_is_listed_by_its_older_name():
    older = nn.ModuleDict({"net": Older()})
    before = older["net"].model.table.clone()
    held = older.state_dict()
    del held["net.layers.0.norm.bias"]
    held["net.strange"] = torch.zeros(1)
    held["net.emb.weights.0"] = torch.zeros(1, 4, 1, 3)
    with pytest.raises(RuntimeError) as error:
        older.load_state_dict(held)
    text = str(error.value)
    assert 'Missing key(s) in state_dict: "net.layers.0.norm.bias"' in text
    assert 'Unexpected key(s) in state_dict: "net.strange"' in text
    assert "size mismatch for net.emb.weights.0: the checkpoint has (1, 4, 1, 3), this model (1, 5, 1, 3)" in text
    assert "model." not in text
    assert torch.equal(older["net"].model.table, before)
    result = older.load_state_dict({k: v for k, v in held.items() if "emb" not in k}, strict=False)
    assert set(result.missing_keys) == {"net.layers.0.norm.bias", "net.emb.weights.0"}


def test_a_tensor_without_an_older_name_is_our_own_mistake():
    older = Older()
    older.model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match=r"no key mapping for \['extra'\]"):
        older.state_dict()


def test_unused_tensors_are_saved_as_they_were_loaded():
    class WithUnused(Older):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 3, bias=False)

        def key_mappings(self):
            yield from super().key_mappings()
            yield KeyMapping(("spare.weight",), ("unused.weight",))

    older, other = nn.ModuleDict({"net": WithUnused()}), nn.ModuleDict({"net": WithUnused()})
    assert set(older.state_dict()) == {f"net.{name}" for name in NAMES | {"spare.weight"}}
    other.load_state_dict(older.state_dict())
    assert torch.equal(other["net"].unused.weight, older["net"].unused.weight)
    assert "unused.weight" not in other["net"].model.state_dict()


def test_concatenate():
    mapping = concatenate(["q", "k"], "qk")
    whole = torch.randn(4, 3)
    assert torch.equal(mapping.to_new(mapping.to_old([whole]))[0], whole)
