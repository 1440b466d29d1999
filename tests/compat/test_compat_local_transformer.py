"""LocalTransformer beside the original: outputs, gradients, caches, masks, generation."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from older import assert_close, assert_parity, copy_weights, gradients, original
from test_compat_local_layer import DIM, B, N, W, right_padded, shaken, vectors
from torch import Tensor, nn

from longspan.compat.local_attention import LocalTransformer
from longspan.compat.state_dict import CompatModel

V = 11
MODEL = {"num_tokens": V, "max_seq_len": 40, "dim": DIM, "depth": 2, "heads": 3, "dim_head": 6}
MODEL |= {"local_attn_window_size": W}


def tokens(n: int = N) -> Tensor:
    return torch.randint(V, (B, n), generator=torch.Generator().manual_seed(8))


class Mixer(nn.Module):
    """Something of a user's own that sees the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.to_out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def assert_both_parities(theirs: nn.Module, ours: nn.Module, run: Callable[..., Any]) -> None:
    """Output and gradient in float32 to 1e-5, and each parameter's gradient in float64 to 1e-5.

    In float32 gradients of single numbers, such as a connection's scale, are sums that cancel: noise in both. The
    gradient as a whole may be twice as far from the truth as the original's, where that is more.
    """
    copy_weights(theirs, ours)
    narrow = [_answer(module, theirs, run) for module in (theirs, ours)]
    assert_close(narrow[1][0], narrow[0][0], "output")
    for module in theirs.double().modules():  # what it made in float32 it should have in float64 too
        if hasattr(module, "inv_freq"):
            pairs = torch.arange(0, 2 * len(module.inv_freq), 2).double() / (2 * len(module.inv_freq))
            module.inv_freq, module.scale = 10000.0**-pairs, (pairs + 0.4) / 1.4
    if theirs.dynamic_pos_bias is not None:
        theirs.dynamic_pos_bias.mlp.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    assert_parity(theirs, ours.double(), run)
    truth = _answer(theirs, theirs, run)[1]
    error = [float((gradient - truth).norm() / truth.norm()) for _, gradient in narrow]
    assert error[1] <= max(1e-5, 2 * error[0])


def _answer(module: nn.Module, theirs: nn.Module, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """The output, and all gradients in one vector."""
    module.zero_grad()
    out, inputs = run(module)
    out.mul(torch.randn(out.shape, generator=torch.Generator().manual_seed(11))).sum().backward()
    held = gradients(module)
    whole = [held[name] for name, _ in theirs.named_parameters()] + [x.grad for x in inputs.values()]
    return out.detach(), torch.cat([x.flatten() for x in whole])


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "streams 4": {},
    "streams 1": {"num_residual_streams": 1},
    "streams 3": {"num_residual_streams": 3, "depth": 1},
    "both ways": {"causal": False},
    "xpos": {"use_xpos": True},
    "dynamic bias": {"use_dynamic_pos_bias": True},
    "dynamic bias of blocks": {"use_dynamic_pos_bias": True, "exact_windowsize": False},
    "normed": {"qk_rmsnorm": True, "qk_scale": 6},
    "gates": {"gate_values_per_head": True, "ff_mult": 3, "look_backward": 2},
    "vectors": {"num_tokens": None},
    "vectors both ways": {"num_tokens": None, "causal": False, "use_xpos": True, "xpos_scale_base": 3},
    "global": {"global_attn_layer": Mixer},
    "global in one layer": {"global_attn_layer": Mixer, "layers_insert_global_attn": (2,), "num_residual_streams": 1},
}


def pair(name: str) -> tuple[nn.Module, LocalTransformer]:
    random.seed(3)  # The original begins its residual streams by chance.
    arguments = MODEL | TRANSFORMERS[name]
    if "global_attn_layer" in arguments:
        arguments["global_attn_layer"] = arguments["global_attn_layer"]()
    return shaken(original("local_attention").LocalTransformer(**arguments)), LocalTransformer(**arguments)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer(name: str, training: bool) -> None:
    theirs, ours = pair(name)

    def run(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        if TRANSFORMERS[name].get("num_tokens", V) is not None:
            return module(tokens(20)), {}
        x = vectors(20).to(next(module.parameters()).dtype).requires_grad_()
        return module(x), {"x": x}

    assert_both_parities(theirs.train(training), ours.train(training), run)


@pytest.mark.parametrize("name", ["streams 4", "streams 1", "both ways", "dynamic bias"])
def test_transformer_masks_and_loss(name: str) -> None:
    theirs, ours = pair(name)
    ours.load_state_dict(theirs.state_dict())
    x, mask = tokens(20), right_padded(20)
    assert_close(ours(x, mask=mask)[mask], theirs(x, mask=mask)[mask])
    # 21 tokens leave windows that are full, so that the original's padding does not count.
    assert_both_parities(theirs, ours, lambda module: (module(tokens(21), return_loss=True), {}))


def test_loss_leaves_out_what_is_masked_or_ignored() -> None:
    """The original counts labels that the mask hides, and cannot embed the token it is told to ignore."""
    theirs, ours = pair("streams 4")
    ours.load_state_dict(theirs.state_dict())
    x, mask = tokens(21), right_padded(21)
    rows = [ours(x[i : i + 1, :n], return_loss=True) * (n - 1) for i, n in enumerate(mask.sum(1).tolist())]
    right = sum(rows) / (mask[:, 1:]).sum()
    assert_close(ours(x, mask=mask, return_loss=True), right)
    left = torch.stack([row.roll(int((~kept).sum())) for row, kept in zip(x, mask, strict=True)])
    assert_close(ours(left, mask=mask.flip(1), return_loss=True), right)
    filled = x.masked_fill(~mask, -1)
    assert_close(ours(filled, return_loss=True), right)
    with pytest.raises(IndexError):
        theirs(filled, return_loss=True)
    counted = LocalTransformer(**MODEL, ignore_index=3)
    logits = counted(x[:, :-1])
    assert_close(counted(x, return_loss=True), F.cross_entropy(logits.mT, x[:, 1:], ignore_index=3))


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if "vectors" not in name])
def test_transformer_cache_is_recomputing(name: str) -> None:
    _, model = pair(name)
    shaken(model).eval()
    x = tokens()
    _, cache = model(x[:, :7], return_cache=True)
    for t in range(8, N + 1):
        whole = model(x[:, :t])
        again = model(x[:, :t], cache=cache)
        logits, cache = model(x[:, :t], cache=cache, return_cache=True)
        assert torch.equal(again, logits)
        assert_close(logits, whole[:, -1:])


def test_what_the_original_cannot_do_or_gets_wrong() -> None:
    """A dynamic bias of windows that look ahead or far back; a layer of the user's own beside a cache."""
    for options in ({"causal": False}, {"look_backward": 2}):
        theirs = original("local_attention").LocalTransformer(**MODEL, use_dynamic_pos_bias=True, **options)
        with pytest.raises(RuntimeError, match="size of tensor"):
            theirs(tokens(20))
        model = shaken(LocalTransformer(**MODEL, use_dynamic_pos_bias=True, **options)).eval()
        before = model(tokens(20))
        with torch.no_grad():
            model.dynamic_pos_bias.mlp[4].weight.mul_(9)
        assert (model(tokens(20)) - before).abs().max() > 1e-3
    theirs, ours = pair("global")
    ours.load_state_dict(theirs.state_dict())
    x = tokens(7)
    for module, wrong in ((theirs.eval(), True), (ours.eval(), False)):
        whole = module(x)[:, -1]
        _, cache = module(x[:, :-1], return_cache=True)
        assert bool(((module(x, cache=cache)[:, -1] - whole).abs() > 1e-3).any()) == wrong


def test_cache_of_vectors_and_its_errors() -> None:
    model = shaken(LocalTransformer(**MODEL | {"num_tokens": None})).eval()
    x = vectors()
    out, cache = model(x[:, :-1], return_cache=True)
    assert_close(out, model(x[:, :-1]))
    assert_close(model(x, cache=cache), model(x)[:, -1:])
    with pytest.raises(ValueError, match="all tokens so far and new ones: got 1 tokens, the cache contains 18"):
        model(x[:, -1:], cache=cache)
    with pytest.raises(ValueError, match="mask cannot be combined with a cache"):
        model(x, cache=cache, mask=right_padded())
    for call in (lambda: model(x, return_loss=True), lambda: model.generate(tokens(), 3)):
        with pytest.raises(ValueError, match="num_tokens is None"):
            call()


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if "vectors" not in name])
def test_generate_is_recomputing(name: str) -> None:
    """Greedy tokens with and without the cache, and those of the original without its cache."""
    theirs, ours = pair(name)
    ours.load_state_dict(theirs.state_dict())
    ours.train()
    prime = tokens(5)
    got = ours.generate(prime, 12, temperature=0.0)
    assert ours.training
    assert got.shape == (B, 12)
    assert torch.equal(got, ours.generate(prime, 12, temperature=0.0, use_kv_cache=False))
    if name != "both ways":
        assert torch.equal(got, theirs.generate(prime, 12, temperature=0.0, use_kv_cache=False, filter_thres=0.5))


def test_generate_reads_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("streams 4")
    seen: list[int] = []
    embed = nn.Embedding.forward
    monkeypatch.setattr(nn.Embedding, "forward", lambda *given: seen.append(given[1].numel() // B) or embed(*given))
    model.generate(tokens(7), 6)
    assert seen == [7, 1, 1, 1, 1, 1]
    seen.clear()
    model.generate(tokens(7), 3, use_kv_cache=False)
    assert seen[::2] == [7, 8, 9]  # every second embedding is that of positions


def test_generate_from_padded_prompts_and_past_the_end() -> None:
    _, model = pair("streams 4")
    shaken(model)
    prime, mask = tokens(9), right_padded(9).flip(1)
    got = model.generate(prime, 5, temperature=0.0, mask=mask)
    assert torch.equal(got[1:], model.generate(prime[1:, 6:], 5, temperature=0.0))
    start = tokens(38)
    with pytest.warns(UserWarning, match=r"generation has passed max_seq_len \(40\)"):
        got = model.generate(start, 6, temperature=0.0)
    out = start
    for _ in range(6):
        out = torch.cat([out, model(out[:, -40:])[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, out[:, 38:])


def test_generate_samples_and_says_no() -> None:
    _, model = pair("streams 1")
    torch.manual_seed(1)
    draws = model.generate(tokens(4), 30, temperature=3.0, filter_thres=0.0)
    torch.manual_seed(1)
    assert torch.equal(draws, model.generate(tokens(4), 30, temperature=3.0, filter_thres=0.0))
    assert len(draws.unique()) > 3
    # A vocabulary of 11 and a threshold of 0.99 leave less than one token; the original then has nothing to draw from.
    assert torch.equal(model.generate(tokens(4), 5, filter_thres=0.99), model.generate(tokens(4), 5, temperature=0.0))
    with pytest.raises(ValueError, match=r"temperature must be 0 .* got -1"):
        model.generate(tokens(4), 5, temperature=-1)
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'top_k'"):
        model.generate(tokens(4), 5, top_k=3)
    with pytest.raises(TypeError, match="LocalTransformer got an unexpected keyword argument 'window_size'"):
        LocalTransformer(**MODEL, window_size=3)
    with pytest.raises(ValueError, match=r"must be layers from 1 to 2, got \[0, 3\]"):
        LocalTransformer(**MODEL, global_attn_layer=Mixer(), layers_insert_global_attn=(0, 3))
    with pytest.raises(ValueError, match="41 tokens are more than the 40 positions"):
        model(tokens(41))


@pytest.mark.parametrize("option", ["attn_dropout", "ff_dropout"])
def test_transformer_dropout(option: str) -> None:
    """The original ignores attn_dropout."""
    model = shaken(LocalTransformer(**MODEL, **{option: 0.5})).train()
    x = tokens()
    assert (model(x) - model(x)).abs().max() > 1e-2
    model.eval()
    assert torch.equal(model(x), model(x))
    if option == "attn_dropout":
        theirs = original("local_attention").LocalTransformer(**MODEL, attn_dropout=0.5).train()
        assert torch.equal(theirs(x), theirs(x))


@pytest.mark.parametrize("streams", [1, 4])
def test_names_without_branch(streams: int) -> None:
    """Releases before residual streams: the shapes win over num_residual_streams, with one warning."""
    theirs = shaken(original("local_attention").LocalTransformer(**MODEL, num_residual_streams=1)).eval()
    old = {name.replace(".branch.", "."): x for name, x in theirs.state_dict().items() if "inv_freq" not in name}
    ours = LocalTransformer(**MODEL, num_residual_streams=streams).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.load_state_dict(old)
    assert [str(w.message)[:58] for w in caught] == ["this checkpoint has no weights for residual streams: the m"] * (
        streams > 1
    )
    assert_close(ours(tokens()), theirs(tokens()))
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert ours.to_longspan().config.residual == "single"
    assert_close(ours.to_longspan()(tokens()), theirs(tokens()))
    # A part of a checkpoint says nothing about streams.
    other = LocalTransformer(**MODEL)
    other.load_state_dict({"token_emb.weight": old["token_emb.weight"]}, strict=False)
    assert other.to_longspan().config.residual == "hyper"


def test_what_does_not_fit_is_listed() -> None:
    model = LocalTransformer(**MODEL)
    held = model.state_dict()
    del held["layers.1.0.static_alpha"]
    held["layers.1.0.branch.strange"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(held)
    assert 'Missing key(s) in state_dict: "layers.1.0.static_alpha"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "layers.1.0.branch.strange"' in str(error.value)


def test_half_precision() -> None:
    model = shaken(LocalTransformer(**MODEL)).eval()
    exact = model(tokens())
    assert isinstance(model, CompatModel)
    half = model.bfloat16()(tokens())
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), exact, tolerance=0.1)
