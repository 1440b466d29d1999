"""Double backward and forward mode raise errors that say what to do; the op decorator, traced and direct."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from longspan.ops.common.autograd import differentiable_op, once_differentiable, refuse_forward_mode
from longspan.ops.gated import gated_linear
from longspan.ops.linear import Sums, causal_linear, causal_linear_out


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * d, None


def cube(x: Tensor) -> Tensor:
    apply: Any = Cube.apply
    return apply(x, 3)


def test_gradients_are_taken_once() -> None:
    x = torch.randn(5, requires_grad=True)
    (d,) = torch.autograd.grad(cube(x).sum(), x)
    torch.testing.assert_close(d, 3 * x.detach() ** 2)
    assert not d.requires_grad


@pytest.mark.parametrize("constant", [True, False], ids=["the gradient of a sum", "of a square"])
def test_a_penalty_on_gradients_is_refused(constant: bool) -> None:
    x = torch.randn(5, requires_grad=True)
    y = cube(x)
    (d,) = torch.autograd.grad(y.sum() if constant else y.square().sum(), x, create_graph=True)
    # With another term beside it a constant would go unnoticed.
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* longspan\.ops\.\*\.reference"):
        (d.square().sum() + x.sum()).backward()


def test_nothing_is_refused_that_is_not_asked_for() -> None:
    x, w = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    (d,) = torch.autograd.grad((cube(x) + w * x).sum(), w, create_graph=True)
    d.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(5))


class Input(NamedTuple):
    x: Tensor
    factor: Tensor | None
    power: int


class Saved(NamedTuple):
    d_out: Tensor
    slope: Tensor


@differentiable_op("longspan_test::power", (Input,), (Saved,), outputs=2, grads=1)
class Power:
    """x^power · factor."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor]:
        x, factor, power = args
        scale = 1.0 if factor is None else factor
        return x**power * scale, power * x ** (power - 1) * scale

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(args[0]), torch.empty_like(args[0])

    @staticmethod
    def visible(outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[1], *inputs[:2])
        ctx.power = inputs[2]

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return backward(*refuse_forward_mode(d_out, *ctx.saved_tensors), ctx.power), None, None

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> Tensor:
        d_out, slope, *_ = args
        return d_out * slope

    @staticmethod
    def backward_fake(*args: Any) -> Tensor:
        return torch.empty_like(args[0])


CALLS = {"traced": lambda *args: Power.traced(*refuse_forward_mode(*args))[0], "direct": Power.direct}


@pytest.mark.parametrize("call", CALLS)
def test_an_op_and_its_gradient(call: str, grad: bool) -> None:
    x = torch.randn(5, requires_grad=grad)
    y = CALLS[call](x, None, 3)
    torch.testing.assert_close(y.detach(), x.detach() ** 3)
    assert y.requires_grad is grad
    if grad:
        (d,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(d, 3 * x.detach() ** 2)


@pytest.mark.parametrize("call", CALLS)
def test_an_op_refuses_double_backward(call: str) -> None:
    x = torch.randn(5, requires_grad=True)
    (d,) = torch.autograd.grad(CALLS[call](x, None, 3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        (d.square().sum() + x.sum()).backward()


def test_opcheck() -> None:
    x = torch.randn(5, requires_grad=True)
    torch.library.opcheck(torch.ops.longspan_test.power.default, (x, torch.ones(1), 3))


def test_fallbacks_of_private_apis(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.common import torch_private

    assert not torch_private.functorch_active()
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    assert torch_private.functorch_active()
    assert torch_private.direct_apply(Cube) is not Cube.apply
    x = torch.randn(5, requires_grad=True)
    torch.testing.assert_close(torch_private.direct_apply(Cube)(x, 3), x**3)


@pytest.mark.parametrize("strict", [False, True])
def test_compiling_is_not_exporting(strict: bool) -> None:
    """PyTorch 2.10 and 2.11 say in code traced by torch.compile that it is exported."""
    from longspan.ops.common.torch_private import is_exporting

    class Sign(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x if is_exporting() else x.clone()

    x, sign = torch.randn(3), Sign()
    torch.testing.assert_close(sign(x), x)
    torch.testing.assert_close(torch.compile(sign, fullgraph=True, backend="eager")(x), x)
    torch.testing.assert_close(torch.export.export(sign, (x,), strict=strict).module()(x), -x)


X = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
FORWARD_MODE: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum())(X),
    "dual": lambda f: f(forward_ad.make_dual(X, X)),
}


@pytest.mark.parametrize("mode", FORWARD_MODE)
def test_forward_mode_gradients_are_refused(mode: str, grad: bool) -> None:
    message = r"forward-mode gradients .* use backward\(\), or .*longspan\.ops\.\*\.reference"
    with forward_ad.dual_level() if mode == "dual" else nullcontext(), pytest.raises(RuntimeError, match=message):
        FORWARD_MODE[mode](lambda x: CALLS["traced"](x, None, 3))


@pytest.mark.parametrize("call", CALLS)
def test_a_tangent_of_the_gradient_is_refused(call: str) -> None:
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(torch.ones_like(X), X)
        with pytest.raises(RuntimeError, match="forward-mode gradients"):
            torch.autograd.grad(CALLS[call](x, None, 3), x, tangent)


def test_forward_mode_passes_by_an_op_without_a_tangent() -> None:
    y = CALLS["traced"](X, None, 3)
    out, tangent = torch.func.jvp(lambda x: CALLS["traced"](X, None, 3) * x, (X,), (X,))
    torch.testing.assert_close((out, tangent), (y * X, y * X))


SIZES: dict[str, tuple[int, ...]] = {"q": (1, 3, 2, 5), "k": (1, 3, 2, 5), "v": (1, 3, 2, 7), "kv": (1, 2, 5, 7)}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "causal_linear": lambda q, k, v, kv: causal_linear(q, k, v, sums=Sums(kv, kv[..., 0], kv[..., 0, 0]))[0],
    "causal_linear_out": lambda q, k, v, kv: causal_linear_out(q, k, v),
    "gated_linear": lambda q, k, v, kv: gated_linear(q, k, v, state=kv)[0],
}


@pytest.mark.parametrize(
    ("function", "argument"),
    [(f, a) for f in FUNCTIONS for a in (*SIZES, "gradient") if (f, a) != ("causal_linear_out", "kv")],
)
def test_operations_refuse_forward_mode(function: str, argument: str) -> None:
    xs = {name: torch.rand(size, dtype=torch.float64, requires_grad=True) for name, size in SIZES.items()}
    ones = torch.ones(SIZES["v"], dtype=torch.float64)

    def run() -> None:
        out = FUNCTIONS[function](*xs.values())
        torch.autograd.grad(out, xs["q"], forward_ad.make_dual(ones, ones))

    with forward_ad.dual_level():
        if argument in xs:
            xs[argument] = forward_ad.make_dual(xs[argument].detach(), xs[argument].detach())
        with pytest.raises(RuntimeError, match="forward-mode gradients"):
            run()
