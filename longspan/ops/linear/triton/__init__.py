"""Triton kernels of linear attention, one file per algorithm. This file needs no Triton."""

from torch import bfloat16, float16, float32

# The feature maps that the kernels implement; any other is refused at dispatch and runs in eager PyTorch.
FEATURE_MAPS = ("identity", "elu", "relu", "softmax", "favor")

# Tokens in a chunk of `fused_chunk`, which the buckets of a blind spot must divide.
FUSED_CHUNK = 64

# Precision of products: bfloat16 has no choice, one tf32 product would round float16's features twice, and float32
# needs its own.
PRECISION = {bfloat16: "tf32", float16: "tf32x3", float32: "ieee"}


def check_feature_map(feature_map: str) -> None:
    """Raise an error for a map that the kernels do not implement."""
    if feature_map not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map must be one of {', '.join(FEATURE_MAPS)} on the Triton kernels, got {feature_map!r}: "
            "use eager PyTorch, or add it to longspan/ops/common/feature_maps.py"
        )
