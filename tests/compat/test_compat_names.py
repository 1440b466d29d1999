"""A model under an older library's names: what it loads, what it says when it does not fit, what it converts to."""

import pytest
import torch
from torch import nn

from longspan.compat.state_dict import CompatModel, KeyMapping, concatenate, rename, rename_layer, with_prefix


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.to_kv = nn.Linear(3, 8, bias=False)
        self.table = nn.Parameter(torch.randn(5, 3))


class Older(CompatModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.k, self.v = nn.Linear(3, 2, bias=False), nn.Linear(3, 6, bias=False)
        self.weights = nn.ParameterList([torch.randn(1, 5, 1, 3)])
        self.shapes = None
        self.record_structure()

    def forward(self, x):
        return self.norm(x)

    def longspan_model(self):
        return Inner()

    def key_mappings(self):
        yield from rename_layer("norm", "norm")
        yield KeyMapping(("k.weight", "v.weight"), ("to_kv.weight",), lambda x: [torch.cat(list(x), 0)])
        yield rename("weights.0", "table")

    def upgrade_key(self, key):
        return key.replace("weights_", "weights.")

    def adapt_to_checkpoint(self, shapes):
        self.shapes = dict(shapes)


@pytest.mark.parametrize("prefix", ["", "net."])
def test_names_of_other_releases_also_inside_another_module(prefix):
    older, other = Older(), Older()
    if prefix:
        outer = nn.ModuleDict({"net": older}), nn.ModuleDict({"net": other})
    else:
        outer = older, other
    held = {name.replace("weights.", "weights_"): tensor for name, tensor in outer[0].state_dict().items()}
    outer[1].load_state_dict(held)
    assert torch.equal(older.weights[0], other.weights[0])
    assert other.shapes["weights.0"] == (1, 5, 1, 3)


def test_what_does_not_fit_is_listed():
    older = nn.ModuleDict({"net": Older()})
    held = older.state_dict()
    del held["net.norm.bias"]
    held["net.strange"] = torch.zeros(1)
    held["net.k.weight"] = torch.zeros(4, 3)
    with pytest.raises(RuntimeError) as error:
        older.load_state_dict(held)
    text = str(error.value)
    assert 'Missing key(s) in state_dict: "net.norm.bias"' in text
    assert 'Unexpected key(s) in state_dict: "net.strange"' in text
    assert "size mismatch for net.k.weight" in text


def test_a_model_converts_and_shares_what_has_the_same_layout():
    older = Older()
    model = older.to_longspan()
    assert torch.equal(model.to_kv.weight, torch.cat([older.k.weight, older.v.weight]))
    assert model.table.shape == (5, 3)
    with torch.no_grad():
        older.weights[0].add_(1)
        older.norm.bias.add_(1)
    assert torch.equal(model.table, older.weights[0].view(5, 3))
    assert torch.equal(model.norm.bias, older.norm.bias)
    assert older.eval().to_longspan().training is False


def test_what_was_altered_is_named():
    changes = {
        "norm was replaced": lambda older: setattr(older, "norm", nn.Identity()),
        "k.weight has another shape": lambda older: setattr(older, "k", nn.Linear(3, 4, bias=False)),
        "v.bias has another shape": lambda older: setattr(older, "v", nn.Linear(3, 6)),
        "norm has a hook": lambda older: older.norm.register_forward_hook(lambda *_: None),
        "the model has a hook": lambda older: older.register_forward_pre_hook(lambda *_: None),
        "k has a hook": lambda older: setattr(older.k, "forward", lambda x: x),
    }
    assert Older().altered() == ""
    for text, change in changes.items():
        older = Older()
        change(older)
        assert older.altered().startswith(text)
        with pytest.raises(ValueError, match=f"Older cannot be converted, because {text}"):
            older.to_longspan()
        older.record_structure()
        assert ("hook" in text) == bool(older.altered())


def test_mappings():
    mapping = concatenate(["q", "k"], "qk")
    halves = torch.randn(2, 2, 3)
    assert torch.equal(mapping.to_new(list(halves))[0], halves.flatten(0, 1))
    (moved,) = with_prefix([mapping], "old.", "new.")
    assert (moved.old, moved.new) == (("old.q", "old.k"), ("new.qk",))
