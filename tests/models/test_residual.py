"""Stacks: what each topology computes, and that how it runs changes neither outputs nor gradients, only memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, check_gradients_by_name, gradients, leaves, lengths_to_mask
from model_cases import shaken
from stack_cases import DIM, EXECUTIONS, B, Live, S, T, tokens, transformer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longspan import Packing
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.layers import Attention
from longspan.models.transformer import Transformer

OTHERS = [(topology, name) for topology, names in EXECUTIONS.items() for name in names if name != "keep"]
SPLIT = {
    "mechanism": "split",
    "parts": [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "linear", "num_heads": 2}],
}


@dataclass
class Given:
    """Inputs of a run: half of the second row and of its context are padding, full of NaN."""

    x: Tensor
    context: Tensor | None
    how: dict[str, Any]

    @classmethod
    def make(cls, masked: bool, needs_grad: bool = True, cross: bool = True) -> Given:
        x, context = tokens(), tokens(length=S)
        how: dict[str, Any] = {}
        if masked:
            how = {"key_mask": lengths_to_mask([T, 5], T, "left"), "context_mask": lengths_to_mask([S, 2], S)}
            x = x.masked_fill(~how["key_mask"][..., None], float("nan"))
            context = context.masked_fill(~how["context_mask"][..., None], float("nan"))
        if not cross:
            how.pop("context_mask", None)
        return cls(x.requires_grad_(needs_grad), context.requires_grad_(needs_grad) if cross else None, how)

    def run(self, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Output where it is real, and every gradient by name."""
        torch.manual_seed(11)
        out = model(self.x, context=self.context, **self.how)
        mask = self.how.get("key_mask")
        out = out if mask is None else out[mask]
        inputs = {"x": self.x, "context": self.context}
        inputs = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
        return out, gradients(out, leaves(model, **inputs))


def compare(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert_same(got[0], expected[0])
    check_gradients_by_name(got[1], expected[1])


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("topology", "execution"), OTHERS)
def test_every_execution_is_the_same(
    topology: str, execution: str, training: bool, masked: bool, needs_grad: bool
) -> None:
    model, given = transformer(topology).train(training), Given.make(masked, needs_grad)
    expected = given.run(model)
    for name, grad in expected[1].items():
        assert grad.abs().sum() > 0, f"{name} has no gradient"
    model.stack.execution = execution
    compare(given.run(model), expected)
    if training:
        model.eval()
        assert not torch.allclose(given.run(model)[0], expected[0]), "dropout did nothing"


@pytest.mark.parametrize(("topology", "execution"), OTHERS)
@pytest.mark.parametrize(
    "options",
    [
        {"attention": AttentionConfig(num_heads=6, num_kv_heads=2, mechanism="linear", qk_norm=True, dropout=0.1)},
        {"attention": AttentionConfig(num_heads=3, num_kv_heads=1, value_gates=True)},
        {"attention": AttentionConfig(num_heads=3, mechanism={"mechanism": "performer", "redraw_interval": None})},
        {"attention": AttentionConfig(num_heads=3, mechanism={"mechanism": "linformer", "rank": 3, "max_length": 20})},
        {"norm_position": "rezero", "norm": "rms"},
        {"axial_stride": 2, "product_keys": (0,), "num_keys": 3, "feed_forward": FeedForwardConfig(chunks=2)},
        {"feed_forward": None, "norm": "scale", "token_shift": (), "causal": False},
    ],
    ids=["grouped", "one-kv-head", "performer", "linformer", "rezero", "axial", "attention-only"],
)
def test_every_execution_of_every_block(topology: str, execution: str, options: dict[str, Any]) -> None:
    if topology == "parallel" and options.get("feed_forward", True) is None:
        with pytest.raises(ValueError, match='residual="parallel" needs feed_forward'):
            transformer(topology, **options)
        return
    model, given = transformer(topology, **options).train(), Given.make(masked=True)
    expected = given.run(model)
    model.stack.execution = execution
    compare(given.run(model), expected)


@pytest.mark.parametrize("execution", ["recompute", "reverse"])
def test_executions_of_a_split_and_of_a_shared_projection(execution: str) -> None:
    shared = AttentionConfig(
        num_heads=3, mechanism={"mechanism": "linformer", "rank": 3, "max_length": 20}, share_projection=True
    )
    for attention in (AttentionConfig(num_heads=3, mechanism=SPLIT, dropout=0.1), shared):
        model, given = transformer("double", attention=attention).train(), Given.make(masked=True)
        expected = given.run(model)
        model.stack.execution = execution
        compare(given.run(model), expected)


@pytest.mark.parametrize(("topology", "execution"), OTHERS)
def test_every_execution_packed(topology: str, execution: str) -> None:
    model = transformer(topology).train()
    x, context = tokens(1, 7).requires_grad_(), tokens(1, 6).requires_grad_()
    how = {"packing": Packing.from_lengths([3, 4]), "context_packing": Packing.from_lengths([5, 1])}
    given = Given(x, context, how)
    expected = given.run(model)
    model.stack.execution = execution
    compare(given.run(model), expected)


@pytest.mark.parametrize(("topology", "execution"), OTHERS)
def test_some_parameters_frozen(topology: str, execution: str) -> None:
    model, given = transformer(topology).train(), Given.make(masked=False)
    frozen = [p for name, p in model.named_parameters() if "to_q" in name or "norm" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)

    def run() -> dict[str, Tensor]:
        torch.manual_seed(11)
        model.zero_grad()
        model(given.x, context=given.context).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = run()
    assert len(expected) == len(list(model.parameters())) - len(frozen)
    model.stack.execution = execution
    check_gradients_by_name(run(), expected)


@pytest.mark.parametrize(("topology", "execution"), OTHERS)
def test_without_gradients_nothing_is_kept_and_nothing_changes(topology: str, execution: str) -> None:
    model, given = transformer(topology), Given.make(masked=True, needs_grad=False)
    expected = given.run(model)[0]
    model.stack.execution = execution
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            out = model(given.x, context=given.context, **given.how)[given.how["key_mask"]]
        assert not out.requires_grad
        assert_same(out, expected)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("topology", "execution"), OTHERS)
def test_recomputation_happens_under_the_same_autocast(topology: str, execution: str, inside: bool) -> None:
    model, given = transformer(topology), Given.make(masked=False)
    truth = given.run(model)
    model, given = model.float().train(False), Given(given.x.detach().float(), given.context.detach().float(), {})
    given.x.requires_grad_()
    given.context.requires_grad_()
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, Attention):
            module.to_q.register_forward_hook(lambda _, args, out: dtypes.add(out.dtype))

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        given.x.grad = given.context.grad = None
        weight = torch.randn(B, T, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(given.x, context=given.context)
            if inside:
                (out.float() * weight).sum().backward()
        if not inside:
            (out.float() * weight).sum().backward()
        found = {name: p.grad for name, p in leaves(model, x=given.x, context=given.context).items()}
        return {"out": out.detach(), **found}

    kept = run()
    model.stack.execution = execution
    got = run()
    assert dtypes == {torch.bfloat16}
    expected = {"out": truth[0].detach(), **truth[1]}
    for name, want in expected.items():
        assert got[name] is not None, f"{name} has no gradient"
        assert got[name].dtype == kept[name].dtype
        if execution != "reverse":
            torch.testing.assert_close(got[name], kept[name], atol=1e-5, rtol=1e-5)
            continue
        # Rebuilt streams round otherwise, so bfloat16 inside amplifies: held to twice the error of keeping.
        scale = want.abs().max()
        error, plain = ((x[name].double() - want).abs().max() / scale for x in (got, kept))
        assert error <= 2 * plain + torch.finfo(torch.bfloat16).eps, f"{name}: {error:.3g}, keep {plain:.3g}"


@pytest.mark.parametrize(("topology", "execution"), [(t, e) for t, names in EXECUTIONS.items() for e in names])
@pytest.mark.filterwarnings("ignore")  # The compiler's own.
def test_every_execution_compiles(topology: str, execution: str) -> None:
    torch._dynamo.reset()
    cross = AttentionConfig(num_heads=2, mechanism={"mechanism": "linear", "feature_map": "relu"})
    model, given = transformer(topology, depth=1, cross=cross), Given.make(masked=False)
    expected = given.run(model)
    model.stack.execution = execution
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, found = given.run(compiled)
    compare((out, {name.removeprefix("_orig_mod."): grad for name, grad in found.items()}), expected)


@pytest.mark.parametrize("execution", ["recompute", "reverse"])
def test_rotary_models_compile_for_all_lengths(execution: str) -> None:
    """Every length and every float is an input of the graph."""
    torch._dynamo.reset()
    mechanism = {"mechanism": "linear", "feature_map": "relu"}
    attention = AttentionConfig(num_heads=3, head_dim=4, mechanism=mechanism, rotary="halves")
    model = Transformer(
        ModelConfig(dim=7, depth=1, residual="double", execution=execution, attention=attention, causal=True)
    )
    compiled = torch.compile(model.double(), fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 11):
        x = torch.randn(2, length, 7, dtype=torch.float64, requires_grad=True)
        got, expected = (torch.autograd.grad(f(x).square().sum(), (x, *model.parameters())) for f in (compiled, model))
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)


def test_torch_func_and_forward_mode_of_reversed_streams() -> None:
    linear = AttentionConfig(num_heads=2, mechanism="linear")
    model, given = transformer("double", attention=linear, cross=linear, causal=False), Given.make(masked=False)
    functions, tangent = [], torch.randn_like(given.x)
    for execution in ("keep", "reverse"):
        model.stack.execution = execution
        run = functools.partial(model, context=given.context.detach())
        _, moved = torch.func.jvp(run, (given.x.detach(),), (tangent,))
        functions.append((moved, torch.func.grad(lambda x, run=run: run(x).square().sum())(given.x.detach())))
    for a, b in zip(*functions, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("frozen", [False, True])
def test_reversed_streams_refuse_gradients_of_gradients(frozen: bool) -> None:
    model, given = transformer("double").requires_grad_(not frozen), Given.make(masked=False)
    model.stack.execution = "reverse"
    (d,) = torch.autograd.grad(model(given.x, context=given.context).sum(), given.x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        (d.square().sum() + given.x.sum()).backward()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(("topology", "execution"), [(t, e) for t, names in EXECUTIONS.items() for e in names])
def test_every_execution_is_data_parallel(topology: str, execution: str, needs_grad: bool) -> None:
    model, given = transformer(topology).train(), Given.make(masked=True, needs_grad=needs_grad)

    def run(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(11)
        model.zero_grad()
        out = model(given.x, context=given.context, **given.how)[given.how["key_mask"]]
        out.square().sum().backward()
        return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}

    expected = {name: grad.clone() for name, grad in run(model).items()}
    model.stack.execution = execution
    parallel = DistributedDataParallel(model)
    check_gradients_by_name(run(parallel), expected)
    check_gradients_by_name(run(parallel), expected)  # the second time buckets are rebuilt in the order of arrival


class Counted(torch.autograd.Function):
    """The identity, with a count of its backward passes."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counted.calls += 1
        return grad


@pytest.mark.parametrize(("topology", "execution"), [(t, e) for t, names in EXECUTIONS.items() for e in names])
def test_the_encoder_behind_a_context_goes_back_once(topology: str, execution: str) -> None:
    model, encoder = transformer(topology, depth=3).train(), shaken(nn.Linear(DIM, DIM))
    source, x = tokens(length=S), tokens()

    def run() -> dict[str, Tensor]:
        torch.manual_seed(11)
        encoder.zero_grad()
        Counted.calls = 0
        model(x, context=Counted.apply(encoder(source))).square().sum().backward()
        assert Counted.calls == 1
        return {name: p.grad.clone() for name, p in encoder.named_parameters()}

    expected = run()
    model.stack.execution = execution
    check_gradients_by_name(run(), expected)


def test_a_context_may_be_used_elsewhere_too() -> None:
    model, encoder, source, x = transformer("double"), shaken(nn.Linear(DIM, DIM)), tokens(length=S), tokens()

    def run() -> dict[str, Tensor]:
        encoder.zero_grad()
        context = encoder(source)
        (model(x, context=context).square().sum() + context.square().sum()).backward()
        return {name: p.grad.clone() for name, p in encoder.named_parameters()}

    expected = run()
    model.stack.execution = "reverse"
    check_gradients_by_name(run(), expected)


# What is refused.


def test_reverse_needs_two_streams() -> None:
    for topology in ("single", "hyper"):
        with pytest.raises(ValueError, match=f'"reverse" needs residual="double", got residual="{topology}"'):
            transformer(topology, execution="reverse")
    with pytest.raises(ValueError, match='post-norm needs residual="single"'):
        transformer("double", execution="reverse", norm_position="post")
    with pytest.raises(ValueError, match='post-norm needs residual="single"'):
        transformer("hyper", norm_position="post")
    with pytest.raises(ValueError, match='a changing width needs residual="single"'):
        transformer("double", execution="reverse", inner_dim=24)


def test_heads_that_differ_are_not_recomputed_apart() -> None:
    differing = [
        AttentionConfig(num_heads=3, mechanism=SPLIT),
        AttentionConfig(num_heads=3, mechanism={"mechanism": "linformer", "per_head": True}),
        AttentionConfig(num_heads=3, mechanism={"mechanism": "local", "window": 3}, dynamic_bias=4),
    ]
    for attention in differing:
        with pytest.raises(ValueError, match=r"the heads of this .* differ.*use execution=\"recompute\""):
            transformer("single", execution="recompute_heads", attention=attention)
    dropout = AttentionConfig(num_heads=3, mechanism={"mechanism": "softmax", "dropout": 0.1})
    with pytest.raises(ValueError, match=r"draws for all its heads at once.*use execution=\"recompute\""):
        transformer("single", execution="recompute_heads", attention=dropout)


def test_a_refused_execution_leaves_the_last_one() -> None:
    model = transformer("single", attention=AttentionConfig(num_heads=3, mechanism=SPLIT))
    for name in ("recompute_heads", "reverse"):
        with pytest.raises(ValueError, match=name.partition("_")[0]):
            model.stack.execution = name
        assert model.stack.execution == "keep"
    with pytest.raises(ValueError, match=r"unknown execution 'revers'.*did you mean 'reverse'"):
        model.stack.execution = "revers"
    with pytest.raises(ValueError, match=r"unknown residual 'singel'.*did you mean 'single'"):
        transformer("singel")


def test_recompute_heads_runs_heads_apart() -> None:
    model = transformer("single", cross=None, depth=1)
    model.stack.execution = "recompute_heads"
    heads: list[int] = []
    attention = model.stack.branches[0].layer
    run = type(attention.mechanism).forward

    def counted(self: Any, q: Tensor, *args: Any, **how: Any) -> Tensor:
        heads.append(q.shape[2])
        return run(self, q, *args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(attention.mechanism), "forward", counted)
        model(tokens())
    assert heads == [1, 1, 1]


def memory(topology: str, execution: str, depth: int) -> tuple[float, float]:
    """Activations (of one vector a token) kept after the forward pass, and at the peak; without the gradients."""
    length, dim = 512, 8
    config = ModelConfig(
        dim=dim,
        depth=depth,
        attention=AttentionConfig(num_heads=2, mechanism="linear", dropout=0.1),
        feed_forward=FeedForwardConfig(dropout=0.1),
        causal=True,
        residual=topology,
        execution=execution,
    )
    model, x = Transformer(config), torch.randn(1, length, dim)
    activation = length * dim * 4
    gradient = sum(p.numel() * 4 for p in model.parameters())
    with Live() as live:
        out = model(x)
        kept = live.bytes
        out.sum().backward()
    return kept / activation, (live.peak - gradient) / activation


def test_reversing_keeps_no_more_at_depth_24_than_at_depth_2() -> None:
    shallow, deep = memory("double", "reverse", 2), memory("double", "reverse", 24)
    assert deep[0] <= 1.3 * shallow[0]
    assert deep[1] <= 1.3 * shallow[1]
    # The measure can tell: keeping grows about as the depth does.
    assert memory("double", "keep", 24)[0] > 8 * memory("double", "keep", 2)[0]


@pytest.mark.parametrize("execution", ["recompute", "recompute_heads"])
@pytest.mark.parametrize("topology", ["single", "double"])
def test_recomputing_keeps_about_an_activation_for_each_branch(topology: str, execution: str) -> None:
    shallow, deep = memory(topology, execution, 4), memory(topology, execution, 14)
    assert (deep[0] - shallow[0]) / 20 <= 2
    assert (deep[1] - shallow[1]) / 20 <= 2
    kept = memory(topology, "keep", 14)[0] - memory(topology, "keep", 4)[0]
    assert kept / 20 > 6
