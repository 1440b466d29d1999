"""Activation of the raw gates of `decay` and `delta`: log α and β, in one launch forward and one backward.

With x = gate + bias, log α is −exp(A_log) softplus(x) or log σ(x) / 16, at least `LOG_UNDERFLOW`, and β is softplus(x)
or strength · σ(first gate); see `GateActivation`. Only the inputs are saved for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, float32, float64

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, group, lazy_module, refuse_forward_mode
from longspan.ops.decode.torch import GateActivation

_kernels = lazy_module("longspan.ops.gates.triton")


def activate_gates(
    gates: Tensor, activation: GateActivation, visible: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute log α and β of raw gates that `why_not_triton` accepts.

    Args:
        gates: Raw gates (B, S, Hkv, G).
        activation: What to compute; its parameters have gradients.
        visible: Mask (B, S); other tokens get log α = 0 and β = 0.

    Returns:
        log α (B, S, Hkv, 1 or D) and β (B, S, Hkv) in float32; None for α = 1 and for β = 1.
    """
    x = GateInputs(gates, activation.A_log, activation.bias, visible)
    options = GateOptions(activation.decay, activation.write, activation.strength)
    log_decay, beta = _ActivateGates.run(*x, *options)
    return None if activation.decay == "none" else log_decay, None if activation.write == "one" else beta


def why_not_triton(gates: Tensor, k: Tensor) -> str | None:
    """Return why the gates beside keys k are activated in eager PyTorch; None if the kernel supports them."""
    return dispatch.unavailable(gates) or why_unsupported(gates, k)


def why_unsupported(gates: Tensor, k: Tensor) -> str | None:
    """Return a reason if the kernel does not support these gates on any device."""
    if gates.dtype not in dispatch.DTYPES or k.dtype == float64:
        return f"gates and keys are {gates.dtype} and {k.dtype}; the kernel takes bfloat16, float16 and float32"
    if gates.shape[3] > dispatch.LARGEST + 1:
        return f"{gates.shape[3]} gates per head are over {dispatch.LARGEST + 1}"
    return None if gates.numel() else "an empty tensor"


class GateInputs(NamedTuple):
    """Tensors of `longspan::activate_gates`."""

    gates: Tensor
    A_log: Tensor | None
    bias: Tensor | None
    visible: Tensor | None


class GateOptions(NamedTuple):
    """Its options, as in `GateActivation`."""

    decay: str
    write: str
    strength: float


class GateGradients(NamedTuple):
    """What its backward pass takes before them."""

    d_log_decay: Tensor
    d_beta: Tensor


@differentiable_op(
    "longspan::activate_gates", (GateInputs, GateOptions), (GateGradients,), outputs=2, grads=3, differentiable=2
)
class _ActivateGates(DifferentiableOp):
    """log α and β; empty tensors for what is not computed."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor]:
        return _kernels().forward(*group(args, GateInputs, GateOptions))

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        x, options = group(args, GateInputs, GateOptions)
        B, S, H, _ = x.gates.shape
        width = 0 if options.decay == "none" or x.bias is None else x.bias.shape[1]
        log_decay = x.gates.new_empty((B, S, H, width) if width else 0, dtype=float32)
        return log_decay, x.gates.new_empty(0 if options.write == "one" else (B, S, H), dtype=float32)

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        count = len(GateInputs._fields)
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    @staticmethod
    def differentiate(backward: Any, ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = backward(*refuse_forward_mode(*grad_outputs, *inputs), *ctx.options)
        given = [None if x is None else grad for grad, x in zip(grads, inputs[:3], strict=True)]
        return *given, None, *[None] * len(ctx.options)

    @staticmethod
    def backward(d_log_decay: Tensor, d_beta: Tensor, *args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        """Return the gradients of gates, A_log and bias; empty tensors for those that were not given."""
        return _kernels().backward(d_log_decay, d_beta, *group(args, GateInputs, GateOptions))

    @staticmethod
    def backward_fake(d_log_decay: Tensor, d_beta: Tensor, *args: Any) -> tuple[Tensor, ...]:
        (x,) = group(args, GateInputs)
        return tuple(x.gates.new_empty(0) if y is None else y.new_empty(y.shape) for y in x[:3])
