"""Feature maps on blocks of registers, one library for all kernels.

`S.MAP` is one of `longspan.ops.linear.triton.FEATURE_MAPS`. "identity", "elu" and "relu" are pointwise; "softmax" and
"favor" are exponentials, whose logarithms kernels scale in their own ways.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import exact_exp, exp

# As in longspan.ops.linear.torch; a test compares them.
RELU_EPSILON = tl.constexpr(1e-3)


@triton.jit
def check_map(MAP: tl.constexpr):
    """Fail at compile time for a map that the kernels do not implement."""
    KNOWN: tl.constexpr = MAP == "identity" or MAP == "elu" or MAP == "relu" or MAP == "softmax" or MAP == "favor"
    tl.static_assert(KNOWN, "the kernels do not implement this feature map")


@triton.jit
def pointwise_features(b_x, S: tl.constexpr, EXACT: tl.constexpr = False):
    """φ(x) of pointwise maps; x itself for exponential ones. EXACT: to the last bit of float32.

    `S` has the member `MAP`. It is read here because Triton 3.6 does not accept a string of a tuple as an argument.
    """
    MAP: tl.constexpr = S.MAP
    check_map(MAP)
    if MAP == "elu":
        if EXACT:
            b_x = tl.maximum(b_x, 0) + exact_exp(tl.minimum(b_x, 0))
        else:
            b_x = tl.maximum(b_x, 0) + exp(tl.minimum(b_x, 0))
    if MAP == "relu":
        b_x = tl.maximum(b_x, 0) + RELU_EPSILON
    return b_x


@triton.jit
def pointwise_gradient(b_g, b_x, b_f, S: tl.constexpr):
    """dx from dφ(x), x and φ(x) of pointwise maps; dφ(x) itself for exponential ones."""
    MAP: tl.constexpr = S.MAP
    check_map(MAP)
    if MAP == "elu":
        b_g = b_g * tl.minimum(b_f, 1)
    if MAP == "relu":
        b_g = tl.where(b_x.to(tl.float32) > 0, b_g, 0)
    return b_g
