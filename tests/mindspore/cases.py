"""The cases in which the two frameworks must agree; imported by both, so nothing here needs either."""

from __future__ import annotations

from typing import Any

HEADS, DIM_HEAD, DIM, WINDOW, TOKENS = 3, 6, 20, 5, 19
LENGTHS = (1, 5, 13, 23)

Options = dict[str, Any]

# LocalAttention's options; "mask" and "bias" say what is passed to the call.
ATTENTION: dict[str, Options] = {
    "causal": {"causal": True},
    "causal_exact": {"causal": True, "exact_windowsize": True},
    "causal_far": {"causal": True, "look_backward": 2},
    "causal_far_exact": {"causal": True, "look_backward": 2, "exact_windowsize": True},
    "causal_own_block": {"causal": True, "look_backward": 0},
    "both": {},
    "both_exact": {"exact_windowsize": True},
    "both_lopsided": {"look_backward": 0, "look_forward": 2},
    "both_lopsided_exact": {"look_backward": 2, "look_forward": 1, "exact_windowsize": True},
    "back_only": {"look_forward": 0},
    "shared": {"causal": True, "shared_qk": True},
    "shared_both": {"shared_qk": True},
    "no_rotary": {"causal": True, "use_rotary_pos_emb": False},
    "no_dim": {"causal": True, "dim": None},
    "old_config": {"causal": True, "dim": None, "rel_pos_emb_config": (DIM_HEAD, HEADS)},
    "scale": {"causal": True, "scale": 2.0},
    "xpos": {"causal": True, "use_xpos": True},
    "xpos_base": {"causal": True, "use_xpos": True, "xpos_scale_base": 7},
    "xpos_both": {"use_xpos": True},
    "mask": {"causal": True, "mask": True},
    "mask_both": {"mask": True},
    "mask_shared": {"causal": True, "shared_qk": True, "mask": True},
    "bias": {"causal": True, "bias": True},
    "bias_both": {"use_rotary_pos_emb": False, "bias": True, "mask": True},
}

# LocalMHA's, over `dim` features.
HEADED: dict[str, Options] = {
    "plain": {},
    "causal": {"causal": True},
    "prenorm": {"causal": True, "prenorm": True},
    "rmsnorm": {"causal": True, "qk_rmsnorm": True},
    "rmsnorm_scale": {"causal": True, "qk_rmsnorm": True, "qk_scale": 3},
    "gates": {"causal": True, "gate_values_per_head": True},
    "blocks": {"causal": True, "exact_windowsize": False},
    "xpos": {"causal": True, "use_xpos": True, "xpos_scale_base": 4},
    "shared": {"causal": True, "shared_qk": True},
    "far": {"causal": True, "look_backward": 2},
    "mask": {"prenorm": True, "mask": True},
    "mask_causal": {"prenorm": True, "mask": True, "causal": True},
    "mask_blocks": {"mask": True, "causal": True, "exact_windowsize": False},
    "bias": {"causal": True, "bias": True, "use_rotary_pos_emb": False},
}

# LocalTransformer's.
MODELS: dict[str, Options] = {
    "default": {},
    "one_stream": {"num_residual_streams": 1},
    "two_streams": {"num_residual_streams": 2},
    "both": {"causal": False},
    "dynamic_bias": {"use_dynamic_pos_bias": True},
    "xpos": {"use_xpos": True, "num_residual_streams": 1},
    "rmsnorm_gates": {"qk_rmsnorm": True, "gate_values_per_head": True},
    "blocks": {"exact_windowsize": False, "num_residual_streams": 1},
    "shared_far": {"shared_qk": True, "look_backward": 2},
    "wide": {"ff_mult": 2},
    "dynamic_bias_both": {"use_dynamic_pos_bias": True, "causal": False},
    "mask": {"mask": True},
    "mask_both": {"mask": True, "causal": False},
    "mask_vectors": {"num_tokens": None, "mask": True},
    "vectors": {"num_tokens": None},
    "ignore": {"ignore_index": 3},
}


def split(options: Options) -> tuple[Options, bool, bool]:
    """A case -> the constructor's options, whether a mask is passed, whether a bias is."""
    made = {name: value for name, value in options.items() if name not in ("mask", "bias")}
    return made, options.get("mask", False), options.get("bias", False)


def model_options(options: Options) -> Options:
    shape = {"num_tokens": TOKENS, "dim": DIM, "depth": 2, "max_seq_len": 31, "local_attn_window_size": WINDOW}
    return {**shape, "dim_head": DIM_HEAD, "heads": HEADS, **options}


def headed_options(options: Options) -> Options:
    return {"dim": DIM, "window_size": WINDOW, "dim_head": DIM_HEAD, "heads": HEADS, **options}


def attention_options(options: Options) -> Options:
    return {"window_size": WINDOW, "dim": DIM_HEAD, "autopad": True, **options}


def bias_shape(causal: bool, look_backward: int = 1) -> tuple[int, int, int]:
    return HEADS, WINDOW, (look_backward + (1 if causal else 2)) * WINDOW
