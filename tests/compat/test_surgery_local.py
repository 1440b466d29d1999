"""What users do to local-attention's models beside calling them, checked by its effect."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from older import assert_close, original
from test_compat_local_layer import DIM, LAYER, shaken, vectors
from test_compat_local_transformer import MODEL, V, tokens
from torch import Tensor, nn

from longspan.compat.local_attention import LocalAttention, LocalMHA, LocalTransformer
from longspan.compat.local_attention.rotary import SinusoidalEmbeddings


def pair(**options: Any) -> list[Any]:
    """The original and ours, with the same weights, in eval mode."""
    random.seed(3)
    theirs = shaken(original("local_attention").LocalTransformer(**MODEL, **options)).eval()
    ours = LocalTransformer(**MODEL, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    return [theirs, ours]


def test_weights_are_read_where_they_are() -> None:
    theirs, ours = pair(qk_rmsnorm=True, gate_values_per_head=True)
    for read in (
        lambda m: m.token_emb.weight,
        lambda m: m.pos_emb.weight,
        lambda m: m.layers[0][0].branch.to_qkv.weight,
        lambda m: m.layers[1][0].branch.to_out.weight,
        lambda m: m.layers[0][0].branch.q_scale,
        lambda m: m.layers[0][0].branch.to_v_gate[0].bias,
        lambda m: m.layers[0][1].branch[4].weight,
        lambda m: m.layers[0][1].static_beta,
        lambda m: m.to_logits[-1].weight,
    ):
        assert torch.equal(read(ours), read(theirs))
    assert ours.layers[0][0].branch.attn_fn.window_size == theirs.layers[0][0].branch.attn_fn.window_size
    with torch.no_grad():
        for model in (theirs, ours):
            model.layers[0][0].branch.to_qkv.weight.mul_(1.5)
    assert_close(ours(tokens()), theirs(tokens()))


def new_head(model: Any) -> None:
    model.to_logits = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3))


def other_vocabulary(model: Any) -> None:
    embedding = nn.Embedding(V + 2, DIM)
    with torch.no_grad():
        embedding.weight[:V] = model.token_emb.weight
    model.token_emb = embedding


def no_attention_in_one_layer(model: Any) -> None:
    class Skip(nn.Module):
        def forward(self, x: Tensor, mask: Any = None, attn_bias: Any = None, cache: Any = None, **other: Any) -> Any:
            return (x * 0.5, None) if other["return_cache"] else x * 0.5

    model.layers[0][0].branch = Skip()


def own_feed_forward(model: Any) -> None:
    model.layers[1][1].branch = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.ReLU())


def one_layer_less(model: Any) -> None:
    del model.layers[-1], model.global_layers[-1]


def own_attention(model: Any) -> None:
    class Mean(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, attn_bias: Any = None) -> Tensor:
            assert q.shape == (2, 3, 19, 6)
            return v.cumsum(2)

    model.layers[0][0].branch.attn_fn = Mean()


def own_positions(model: Any) -> None:
    class Slower(nn.Module):
        def forward(self, x: Tensor) -> Any:
            t = torch.arange(x.shape[-2]).float() / 3
            freqs = t[:, None] * torch.linspace(0.1, 1, x.shape[-1] // 2)
            return torch.cat([freqs, freqs], -1), torch.ones(1)

    for attention, _ in model.layers:
        attention.branch.attn_fn.rel_pos = Slower()


def slower_frequencies(model: Any) -> None:
    for attention, _ in model.layers:
        attention.branch.attn_fn.rel_pos.inv_freq /= 4


def wider_windows(model: Any) -> None:
    for attention, _ in model.layers:
        attention.branch.attn_fn.window_size = 7


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(
    "change",
    [
        new_head,
        other_vocabulary,
        no_attention_in_one_layer,
        own_feed_forward,
        one_layer_less,
        own_attention,
        own_positions,
        slower_frequencies,
        wider_windows,
    ],
)
def test_parts_are_replaced(change: Any, streams: int) -> None:
    """The changed model answers as the changed original does; before, it answered otherwise; gradients reach it."""
    models = pair(num_residual_streams=streams)
    before = models[1](tokens())
    outs = []
    for model in models:
        torch.manual_seed(5)
        change(model)
        x = tokens()
        outs.append(model(x))
    assert_close(outs[1], outs[0])
    assert outs[1].shape != before.shape or change is other_vocabulary or (outs[1] - before).abs().max() > 1e-4
    outs[1].square().sum().backward()
    assert all(p.grad is not None for name, p in models[1].named_parameters() if "attn_fn" not in name)


@pytest.mark.parametrize(("change", "reason"), [(own_feed_forward, "was replaced"), (slower_frequencies, "inv_freq")])
def test_generation_recomputes_what_was_changed(change: Any, reason: str) -> None:
    theirs, ours = pair()
    for model in (theirs, ours):
        torch.manual_seed(5)
        change(model)
    with pytest.warns(UserWarning, match=f"{reason}.*each token recomputes all tokens"):
        got = ours.generate(tokens(7), 5, temperature=0.0)
    assert torch.equal(got, theirs.generate(tokens(7), 5, temperature=0.0, use_kv_cache=False, filter_thres=0.5))


def test_generation_with_a_hook_calls_it() -> None:
    ours = pair()[1]
    calls = []
    with ours.layers[0][0].branch.register_forward_hook(lambda *_: calls.append(1)):
        with pytest.warns(UserWarning, match="has a hook: each token recomputes all tokens"):
            ours.generate(tokens(7), 3)
        assert len(calls) == 3
    ours.generate(tokens(7), 3)
    assert len(calls) == 3


def test_generation_uses_changed_window_sizes() -> None:
    ours = pair()[1]
    wider_windows(ours)
    got = ours.generate(tokens(7), 9, temperature=0.0)
    assert torch.equal(got, ours.generate(tokens(7), 9, temperature=0.0, use_kv_cache=False))


def test_hooks_fire_on_every_module() -> None:
    """Containers and leaves; the values that hooks see and return are the original's."""
    models = pair(gate_values_per_head=True)
    shapes: list[dict[str, Any]] = [{}, {}]
    for model, seen in zip(models, shapes, strict=True):
        for name, module in model.named_modules():

            def note(module: nn.Module, inputs: Any, out: Any, name: str = name, seen: dict[str, Any] = seen) -> None:
                first = out[0] if isinstance(out, tuple) else out
                seen[name] = tuple(first.shape)

            module.register_forward_hook(note)
        model(tokens())
    assert shapes[1].keys() == shapes[0].keys()
    for name, shape in shapes[0].items():  # inside connections the original has a dimension of size 1 more
        if not name.endswith("_fracs"):
            assert [n for n in shapes[1][name] if n > 1] == [n for n in shape if n > 1], name


@pytest.mark.parametrize("causal", [True, False])
def test_attention_maps_are_seen_by_a_hook(causal: bool) -> None:
    maps: list[Tensor] = []
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    outs = []
    for cls in (original("local_attention").LocalAttention, LocalAttention):
        layer = cls(5, dim=6, causal=causal)
        layer.dropout.register_forward_hook(lambda *given: maps.append(given[2]))
        q = torch.randn(2, 3, 20, 6, generator=torch.Generator().manual_seed(1))
        outs.append(layer(q, q, q, mask=mask)[0])  # in the second row, queries see no key
    assert_close(outs[1], outs[0])
    assert_close(maps[1][:3], maps[0][:3])


def test_hooks_change_values() -> None:
    models = pair()
    outs = []
    for model in models:
        model.layers[0][0].branch.attn_fn.register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:]))
        model.layers[1][1].register_forward_hook(lambda *given: given[2] * 0.5)
        model.layers[1][0].branch.attn_fn.rel_pos.register_forward_hook(lambda *given: (given[2][0] * 0.5, given[2][1]))
        outs.append(model(tokens()))
    assert_close(outs[1], outs[0])
    gradients = []
    models[1].to_logits[0].register_full_backward_hook(lambda *given: gradients.append(given[1][0].shape))
    models[1](tokens()).sum().backward()
    assert gradients == [(2, 19, DIM)]


def test_only_the_last_layer_is_trained() -> None:
    ours = pair()[1]
    for p in ours.parameters():
        p.requires_grad = False
    for p in (*ours.layers[-1].parameters(), *ours.to_logits.parameters()):
        p.requires_grad = True
    before = copy.deepcopy(ours.state_dict())
    optimizer = torch.optim.SGD((p for p in ours.parameters() if p.requires_grad), lr=0.1)
    ours(tokens(), return_loss=True).backward()
    optimizer.step()
    changed = {name for name, x in ours.state_dict().items() if not torch.equal(x, before[name])}
    assert changed
    assert all(name.startswith(("layers.1.", "to_logits.")) for name in changed)


def test_modules_are_found_by_type_and_parameters_by_name() -> None:
    ours = pair()[1]
    kinds = [
        sum(isinstance(m, cls) for m in ours.modules()) for cls in (LocalMHA, LocalAttention, SinusoidalEmbeddings)
    ]
    assert kinds == [2, 2, 2]
    assert sum(isinstance(m, nn.LayerNorm) for m in ours.modules()) == 5
    decayed = [p for name, p in ours.named_parameters() if p.ndim > 1 and "emb" not in name]
    others = [p for name, p in ours.named_parameters() if p.ndim < 2 or "emb" in name]
    assert len(decayed) + len(others) == len(list(ours.parameters()))
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2)
    first = ours(tokens(), return_loss=True)
    first.backward()
    optimizer.step()
    assert ours(tokens(), return_loss=True) < first


def test_an_optimizer_of_the_original_goes_on() -> None:
    """Parameters are in the same order: the next step of both is the same."""
    models = pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) for model in models]
    models[0](tokens(), return_loss=True).backward()
    optimizers[0].step()
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(tokens(23), return_loss=True).backward()
        optimizer.step()
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    assert_close(weights[1], weights[0], tolerance=1e-6)


def test_copies_and_files() -> None:
    ours = pair(use_dynamic_pos_bias=True)[1]
    expected = ours(tokens())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for twin in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert torch.equal(twin(tokens()), expected)
        with torch.no_grad():
            twin.to_logits[1].weight.zero_()
        assert torch.equal(ours(tokens()), expected)
    assert_close(copy.deepcopy(ours).double()(tokens()), expected.double())


def test_checkpoints_with_another_head_load_partly() -> None:
    theirs, _ = pair()
    ours = LocalTransformer(**MODEL)
    new_head(ours)
    held = {name: x for name, x in theirs.state_dict().items() if not name.startswith("to_logits")}
    result = ours.load_state_dict(held, strict=False)
    assert set(result.missing_keys) == {f"to_logits.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    assert not result.unexpected_keys
    assert torch.equal(ours.layers[1][0].branch.to_out.weight, theirs.layers[1][0].branch.to_out.weight)


def test_a_layer_inside_a_model_of_the_users_own() -> None:
    """State dicts nest, and training moves every weight as it moves the original's."""

    class Block(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.attn, self.head = layer, nn.Linear(DIM, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.attn(x)).mean(1))

    options = LAYER | {"prenorm": True, "qk_rmsnorm": True, "causal": True}
    blocks = [Block(original("local_attention").LocalMHA(**options)), Block(LocalMHA(**options))]
    blocks[1].load_state_dict(blocks[0].state_dict())
    for block in blocks:
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            block(vectors()).square().sum().backward()
            optimizer.step()
    for (name, mine), yours in zip(blocks[1].named_parameters(), blocks[0].parameters(), strict=True):
        assert_close(mine, yours, name, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_dynamic_pos_bias": True}, {"causal": False, "num_residual_streams": 1}])
def test_compiled(options: dict[str, Any]) -> None:
    ours = pair(**options)[1]
    compiled = torch.compile(ours, fullgraph=True)
    assert_close(compiled(tokens()), ours(tokens()))
