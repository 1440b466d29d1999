"""Triton kernels of linear attention, one file per algorithm."""

# The feature maps that the kernels implement; any other is refused at dispatch and runs in eager PyTorch.
FEATURE_MAPS = ("identity", "elu", "relu", "softmax", "favor")
