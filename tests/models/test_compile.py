"""Living with PyTorch: compilation, autocast, half precision, copies, saved states, torch.func, odd memory layouts."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from longspan import (
    AttentionConfig,
    LanguageModel,
    Mechanism,
    ModelConfig,
    Packing,
    State,
    build_mechanism,
    list_mechanisms,
)
from longspan.ops.linear import FLOOR

B, T, H, D, E = 2, 17, 3, 5, 7

OPTIONS: dict[str, dict] = {
    "local": {"window": 4},
    "mixture": {"window": 4},
    "linformer": {"rank": 3, "max_length": 41},
    "decay": {"gate": "fixed"},
    "split": {
        "parts": [
            {"mechanism": "local", "num_heads": 1, "window": 4, "look_back": 1},
            {"mechanism": "linear", "num_heads": 2, "feature_map": "softmax", "blind_spot": 3},
        ]
    },
}
UNGATED = [name for name in list_mechanisms() if name != "delta"]  # those that take q, k and v alone
ALL = pytest.mark.parametrize("name", UNGATED)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
MASK = torch.arange(T) < torch.tensor([[T], [11]])
PACKING = Packing.from_lengths([6, 1, 10])


def build(name: str, **options: object) -> Mechanism:
    return build_mechanism(name, H, D, value_dim=E, **(OPTIONS.get(name, {}) | options)).eval()


def inputs(batch: int = B, length: int = T, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [torch.randn(batch, length, H, dim, dtype=dtype, requires_grad=grad) for dim in (D, D, E)]


def compiled(function: Callable, **options: object) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def gradients(out: Tensor, mechanism: Mechanism, *xs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.square().sum(), (*xs, *mechanism.parameters())))


# Compilation


@ALL
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@CAUSAL
def test_compiled_forward_and_backward(name: str, causal: bool, mask: Tensor | None) -> None:
    mechanism, xs = build(name), inputs(grad=True)
    out = compiled(mechanism)(*xs, causal=causal, key_mask=mask)
    expected = mechanism(*xs, causal=causal, key_mask=mask)
    close(out, expected)
    for got, wanted in zip(gradients(out, mechanism, *xs), gradients(expected, mechanism, *xs), strict=True):
        close(got, wanted)


@ALL
@CAUSAL
def test_compiled_packing(name: str, causal: bool) -> None:
    mechanism, xs = build(name), inputs(1)
    attend = compiled(lambda q, k, v, packing: mechanism(q, k, v, causal=causal, packing=packing))
    close(attend(*xs, PACKING), mechanism(*xs, causal=causal, packing=PACKING))


@ALL
def test_compiled_step(name: str) -> None:
    mechanism, xs = build(name), inputs()
    step = compiled(mechanism.step)
    expected = mechanism(*xs, causal=True)
    state = mechanism.new_state(B, max_length=T)
    with torch.no_grad():
        for t in range(5):
            out, state = step(state, *(x[:, t : t + 1] for x in xs))
            close(out, expected[:, t : t + 1])
    assert state.length.tolist() == [5, 5]


@pytest.mark.parametrize("name", ["linear", "local"])
def test_compiled_extend(name: str) -> None:
    mechanism, xs = build(name), inputs(length=18)
    extend = compiled(mechanism.extend)
    out, state = extend(mechanism.new_state(B), *(x[:, :9] for x in xs))
    rest, state = extend(state, *(x[:, 9:] for x in xs))
    close(torch.cat([out, rest], 1), mechanism(*xs, causal=True))


@pytest.mark.parametrize(
    ("name", "causal"), [("softmax", True), ("linear", True), ("performer", False), ("linformer", True)]
)
def test_one_compilation_for_every_length(name: str, causal: bool) -> None:
    mechanism = build(name, **({"max_length": 300} if name == "linformer" else {}))
    counter = CompileCounterWithBackend("aot_eager")
    attend = compiled(lambda q, k, v: mechanism(q, k, v, causal=causal), backend=counter)
    for length in (17, 19, 130, 300):
        xs = inputs(length=length)
        for x in xs:
            torch._dynamo.mark_dynamic(x, 1)
        close(attend(*xs), mechanism(*xs, causal=causal))
    assert counter.frame_count == 1


def test_local_compiles_for_another_length() -> None:
    mechanism = build("local")
    attend = compiled(mechanism)
    for length in (9, 11):
        xs = inputs(length=length)
        close(attend(*xs), mechanism(*xs))


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="inductor needs a C compiler")
@pytest.mark.filterwarnings("ignore")  # The compiler's own.
def test_inductor() -> None:
    mechanism, xs = build("linear"), inputs(grad=True)
    out = compiled(mechanism, backend="inductor")(*xs, causal=True)
    expected = mechanism(*xs, causal=True)
    close(out, expected)
    for got, wanted in zip(gradients(out, mechanism, *xs), gradients(expected, mechanism, *xs), strict=True):
        close(got, wanted)


def test_compiled_checks_still_speak() -> None:
    mask = MASK.clone()
    mask[0, 5] = False
    attend, xs = compiled(build("linear")), inputs()
    with pytest.raises(RuntimeError, match="each row of key_mask must be one run of True"):
        attend(*xs, causal=True, key_mask=mask)


# The custom operator


def operator_inputs(feature_map: str, normalize: bool, grad: bool = True, dtype: torch.dtype = torch.float64) -> tuple:
    q, k = (torch.randn(B, T, heads, D, dtype=dtype, requires_grad=grad) for heads in (2 * H, H))
    v = torch.randn(B, T, H, E, dtype=dtype, requires_grad=grad)
    weight = torch.randn(4, D, dtype=dtype) if feature_map == "favor" else None
    features, width = D if weight is None else 4, E + normalize
    kv = torch.rand(B, H, features, width, dtype=dtype, requires_grad=grad)
    shift = torch.full((B, H), FLOOR if feature_map == "favor" else 0.0, dtype=dtype)
    kv = (kv.detach() * 0).requires_grad_(grad) if feature_map == "favor" else kv
    return q, k, v, weight, None, torch.tensor([T, 11]), kv, shift, None, feature_map, normalize, 1, True, "torch", 0.0


@pytest.mark.parametrize(("feature_map", "normalize"), [("elu", True), ("favor", True), ("identity", False)])
def test_opcheck(feature_map: str, normalize: bool) -> None:
    torch.library.opcheck(torch.ops.longspan.causal_linear.default, operator_inputs(feature_map, normalize))


def test_opcheck_backward() -> None:
    arguments = operator_inputs("elu", True, grad=False)
    out, kv, _, den, *starts = torch.ops.longspan.causal_linear(*arguments)
    tests = ("test_schema", "test_faketensor")  # It is never differentiated again.
    operator = torch.ops.longspan.causal_linear_backward.default
    arguments = (torch.randn_like(out), torch.randn_like(kv), out, den, *starts, *arguments)
    torch.library.opcheck(operator, arguments, test_utils=tests)


# Precision


@ALL
@CAUSAL
def test_autocast_changes_nothing(name: str, causal: bool) -> None:
    """Autocast would round the products inside; a mechanism takes what it is given and keeps its sums."""
    mechanism, xs = build(name), inputs(length=130 if name != "linformer" else 41, grad=True)
    plain = mechanism(*xs, causal=causal)
    with torch.autocast("cpu", torch.bfloat16):
        out = mechanism(*xs, causal=causal)
        half = mechanism(*(x.bfloat16() for x in xs), causal=causal)
        state = mechanism.new_state(B)
        first, state = mechanism.step(state, *(x[:, :1] for x in xs))
        written = mechanism.write(mechanism.new_state(B), *(x[:, 1:] for x in xs[1:]))
    assert out.dtype == torch.float32
    assert torch.equal(out, plain)
    assert half.dtype == torch.bfloat16
    assert first.dtype == torch.float32
    again = mechanism.write(mechanism.new_state(B), *(x[:, 1:] for x in xs[1:]))
    for got, expected in zip(written.tensors().values(), again.tensors().values(), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(gradients(out, mechanism, *xs), gradients(plain, mechanism, *xs), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@CAUSAL
def test_half_precision_is_as_near_as_plain_torch(dtype: torch.dtype, causal: bool) -> None:
    """No further from the truth than twice plain PyTorch in that dtype, plus one unit in the last place."""
    # Plain PyTorch in the dtype, with whole matrices: what a user would write.
    q, k, v = inputs(length=130, dtype=dtype)
    hidden = torch.ones(130, 130, dtype=torch.bool).triu(1) & causal

    def plain(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        def mean(weights: Tensor) -> Tensor:
            weights = weights.masked_fill(hidden, 0)
            return torch.einsum("bhts,bshe->bthe", weights / weights.sum(-1, keepdim=True), v)

        dots = torch.einsum("bthd,bshd->bhts", q, k) / D**0.5
        near = (torch.arange(130)[:, None] - torch.arange(130)).abs() < 4
        return {
            "softmax": mean(dots.softmax(-1)),
            "local": mean(dots.masked_fill(~near, float("-inf")).masked_fill(hidden, float("-inf")).softmax(-1)),
            "linear": mean(torch.einsum("bthd,bshd->bhts", F.elu(q) + 1, F.elu(k) + 1)),
        }

    rough, truth = plain(q, k, v), plain(q.double(), k.double(), v.double())
    for name in rough:
        out = build(name)(q, k, v, causal=causal)
        assert out.dtype == dtype
        error, allowed = ((x.double() - truth[name]).abs().max().item() for x in (out, rough[name]))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * truth[name].abs().max().item()


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_everywhere(name: str, dtype: torch.dtype) -> None:
    """Inputs, outputs and streaming in a half dtype; what is summed over the sequence is float32."""
    mechanism, xs = build(name), inputs(length=41, dtype=dtype)
    truth = copy.deepcopy(mechanism).double()(*(x.double() for x in xs), causal=True)
    parallel = mechanism(*xs, causal=True)
    state = mechanism.new_state(B, max_length=41, dtype=dtype)
    with torch.no_grad():
        for t in range(41):
            out, state = mechanism.step(state, *(x[:, t : t + 1] for x in xs))
            assert out.dtype == dtype
    for got in (parallel[:, -1:], out):
        torch.testing.assert_close(got.double(), truth[:, -1:], atol=3e-2, rtol=3e-2)
    summed = [x for n, x in state.tensors().items() if n.rsplit(".", 1)[-1] in ("kv", "z", "open_kv", "open_z")]
    assert all(x.dtype == torch.float32 for x in summed)


# Copies and files


@ALL
def test_deepcopy(name: str) -> None:
    mechanism, xs = build(name), inputs()
    copied = copy.deepcopy(mechanism)
    assert torch.equal(copied(*xs, causal=True), mechanism(*xs, causal=True))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in mechanism.parameters()}
    state = mechanism.write(mechanism.new_state(B), *xs[1:]).detach()
    held = copy.deepcopy(state)
    assert torch.equal(copied.read(held, xs[0]), mechanism.read(state, xs[0]))


@ALL
def test_state_dict_round_trip(name: str) -> None:
    mechanism, xs = build(name), inputs()
    for parameter in mechanism.parameters():
        torch.nn.init.normal_(parameter)
    file = io.BytesIO()
    torch.save(mechanism.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = build(name)
    if mechanism.state_dict():
        assert not torch.equal(other(*xs), mechanism(*xs)), "another draw, until the weights are loaded"
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(*xs), mechanism(*xs))
    state = mechanism.write(mechanism.new_state(B), *xs[1:])
    assert torch.equal(other.read(state, xs[0]), mechanism.read(state, xs[0]))


@ALL
def test_pickled_state(name: str) -> None:
    mechanism, xs = build(name), inputs()
    state = mechanism.write(mechanism.new_state(B), *xs[1:])
    thawed = pickle.loads(pickle.dumps(state))
    assert type(thawed) is type(state)
    assert isinstance(thawed, State)
    assert torch.equal(mechanism.read(thawed, xs[0]), mechanism.read(state, xs[0]))


@ALL
def test_pickled_mechanism(name: str) -> None:
    mechanism, xs = build(name), inputs()
    assert torch.equal(pickle.loads(pickle.dumps(mechanism))(*xs, causal=True), mechanism(*xs, causal=True))


@ALL
def test_on_the_meta_device(name: str) -> None:
    """Shapes without numbers: to plan memory, or to load weights later."""
    mechanism = build(name).to("meta")
    out = mechanism(*(x.to("meta") for x in inputs()))
    assert out.shape == (B, T, H, E)
    state = mechanism.new_state(B, max_length=T, device="meta")
    assert all(x.device.type == "meta" for x in state.tensors().values())


# torch.func


@ALL
@CAUSAL
def test_vmap(name: str, causal: bool) -> None:
    mechanism, xs = build(name), [torch.stack([x, x + 1, x - 1]) for x in inputs()]
    out = torch.func.vmap(lambda q, k, v: mechanism(q, k, v, causal=causal))(*xs)
    close(out, torch.stack([mechanism(*row, causal=causal) for row in zip(*xs, strict=True)]))


@ALL
@CAUSAL
def test_functional_call(name: str, causal: bool) -> None:
    mechanism, xs = build(name), inputs()
    tensors = dict(mechanism.named_parameters()) | dict(mechanism.named_buffers())
    out = torch.func.functional_call(mechanism, tensors, tuple(xs), {"causal": causal})
    assert torch.equal(out, mechanism(*xs, causal=causal))
    if name == "linformer":
        changed = {key: 2 * x for key, x in tensors.items()}
        assert not torch.equal(torch.func.functional_call(mechanism, changed, tuple(xs), {"causal": causal}), out)


# The causal operator of the other mechanisms has a derivative for autograd, and none for torch.func; decay and mixture
# run it in both directions.
FUNC = [(name, False) for name in UNGATED if name not in ("decay", "mixture")] + [("softmax", True), ("local", True)]


@pytest.mark.parametrize(("name", "causal"), FUNC)
def test_func_grad(name: str, causal: bool) -> None:
    mechanism, (q, k, v) = build(name), inputs(grad=True)
    got = torch.func.grad(lambda q, k, v: mechanism(q, k, v, causal=causal).square().sum(), argnums=(0, 1, 2))(
        *(x.detach() for x in (q, k, v))
    )
    expected = torch.autograd.grad(mechanism(q, k, v, causal=causal).square().sum(), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", ["softmax", "linear", "performer", "linformer"])
def test_func_grad_of_a_stream(name: str) -> None:
    """One token at a time there is no operator in between."""
    mechanism, xs = build(name), inputs(length=3)

    def stream(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, total = mechanism.new_state(B), torch.zeros(())
        for t in range(3):
            out, state = mechanism.step(state, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
            total = total + out.square().sum()
        return total

    got = torch.func.grad(stream)(*xs)
    q = xs[0].clone().requires_grad_()
    close(got, torch.autograd.grad(mechanism(q, *xs[1:], causal=True).square().sum(), q)[0])


@ALL
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@CAUSAL
def test_forward_mode_is_right_or_refused(name: str, causal: bool, which: int) -> None:
    mechanism, xs = build(name).double(), inputs(dtype=torch.float64)
    tangent = torch.randn_like(xs[which])

    def run(x: Tensor) -> Tensor:
        return mechanism(*xs[:which], x, *xs[which + 1 :], causal=causal)

    try:
        _, got = torch.func.jvp(run, (xs[which],), (tangent,))
    except (RuntimeError, NotImplementedError) as error:
        got = str(error)
    if isinstance(got, str):
        assert "forward-mode gradients" in got or "forward AD" in got  # longspan's, or PyTorch's
        return
    step = 1e-6 * tangent
    torch.testing.assert_close(got, (run(xs[which] + step) - run(xs[which] - step)) / 2e-6, atol=1e-6, rtol=1e-6)


# Memory layouts


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    return torch.stack([x, x], 2).flatten(1, 2)[:, ::2]


def strided_width(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


@ALL
@CAUSAL
@pytest.mark.parametrize("layout", [heads_first, every_other, strided_width])
def test_non_contiguous_inputs(name: str, causal: bool, layout: Callable[[Tensor], Tensor]) -> None:
    mechanism, xs = build(name), inputs(grad=True)
    moved = [layout(x.detach()).requires_grad_() for x in xs]
    assert not any(x.is_contiguous() for x in moved)
    expected, out = mechanism(*xs, causal=causal), mechanism(*moved, causal=causal)
    close(out, expected)
    for a, b in zip(gradients(out, mechanism, *moved), gradients(expected, mechanism, *xs), strict=True):
        close(a, b)


@ALL
@CAUSAL
def test_expanded_inputs(name: str, causal: bool) -> None:
    """One key head and one row seen as many: memory is shared, so nothing may be written into it."""
    mechanism = build(name)
    q, k, v = (x[:1, :, :1].clone() for x in inputs())
    before = [x.clone() for x in (q, k, v)]
    wide = [x.expand(B, -1, H, -1) for x in (q, k, v)]
    close(mechanism(*wide, causal=causal), mechanism(*(x.contiguous() for x in wide), causal=causal))
    with torch.no_grad():
        state = mechanism.new_state(B, max_length=T)
        mechanism.step(state, *(x[:, :1] for x in wide))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@ALL
def test_grad_of_an_expanded_output(name: str) -> None:
    """`sum().backward()` sends back a gradient of stride 0."""
    mechanism, xs = build(name), inputs(grad=True)
    summed = torch.autograd.grad(mechanism(*xs, causal=True).sum(), xs)
    dense = torch.autograd.grad(mechanism(*xs, causal=True), xs, torch.ones(B, T, H, E))
    for a, b in zip(summed, dense, strict=True):
        close(a, b)


@ALL
def test_inference_mode(name: str) -> None:
    mechanism, xs = build(name), inputs()
    expected = mechanism(*xs, causal=True)
    with torch.inference_mode():
        assert torch.equal(mechanism(*xs, causal=True), expected)
        state = mechanism.new_state(B, max_length=T)
        for t in range(T):
            out, state = mechanism.step(state, *(x[:, t : t + 1] for x in xs))
    close(out, expected[:, -1:])


def test_a_gated_hybrid_with_convolutions_compiles() -> None:
    """The layers of Gated DeltaNet beside a window, in one graph, with the gradients of eager mode."""
    parts = [{"mechanism": "local", "window": 7, "num_heads": 1}, {"mechanism": "delta", "num_heads": 1}]
    layer = {"conv_size": 4, "out_norm": True, "out_gate": "silu", "rotary": {"local": "halves"}}
    attention = AttentionConfig(num_heads=2, mechanism={"mechanism": "split", "parts": parts}, **layer)
    model = LanguageModel(ModelConfig(dim=12, depth=1, attention=attention, causal=True, vocab_size=17))
    tokens, labels = torch.randint(17, (2, 65)), torch.randint(17, (2, 65))
    eager = model.loss(tokens, labels)
    expected = torch.autograd.grad(eager, list(model.parameters()))
    loss = compiled(model.loss)(tokens, labels)
    close(loss, eager)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        close(got, want)


@pytest.mark.parametrize(
    "options",
    [{"out_gate": "silu"}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"conv_size": 3}, {"qkv_bias": True}))],
    ids=str,
)
def test_projections_are_one_product(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a GPU: the same outputs and gradients from one product of x where layers have no bias."""
    monkeypatch.setattr("longspan.models.layers.compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    attention = AttentionConfig(num_heads=2, mechanism="softmax", **options)
    config = ModelConfig(dim=10, depth=1, causal=True, vocab_size=13, attention=attention, ngrams=(2, 3))
    model, tokens = LanguageModel(config).double(), torch.randint(13, (2, T))
    expected = model.loss(tokens)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    graphs = CompileCounterWithBackend("aot_eager")
    loss = compiled(model.loss, backend=graphs)(tokens)
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=0)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    inputs = [str(node.args[0]) for node in graphs.graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(inputs) == (6 if "qkv_bias" in options else 5)
    assert any("hash_ngrams" in str(node.target) for node in graphs.graphs[0].graph.nodes)


@pytest.mark.parametrize("in_fp32", [True, False])
def test_the_residual_stream_under_autocast(in_fp32: bool) -> None:
    config = ModelConfig(dim=16, depth=2, vocab_size=13, residual_in_fp32=in_fp32)
    model, found = LanguageModel(config), []
    model.transformer.stack.branches[-1].register_forward_pre_hook(lambda layer, args: found.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.arange(7)[None])
    model(torch.arange(7)[None])
    assert found == [torch.float32 if in_fp32 else torch.bfloat16, torch.float32]
    assert out.dtype == torch.bfloat16
