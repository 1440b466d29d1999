"""The Triton kernels of a decode step under Triton's interpreter, on the CPU, and the eager steps they replace."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from step_cases import CASES, EAGER, D, compare, gates, inputs, mechanism, rotary

from longspan import AttentionConfig, FeedForwardConfig, LanguageModel, ModelConfig
from longspan.mechanisms import gated, linear, linformer, local, mixture, write_buffer
from longspan.models import residual
from longspan.models.residual import _with_length
from longspan.ops import decode
from longspan.ops import window as window_op
from longspan.ops.common import dispatch
from longspan.ops.rotary import cos_sin
from longspan.ops.window.torch import tiled_window_attention_with_lse
from longspan.protocol import Mechanism

by_name = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode, gated, linear, local, linformer, mixture, window_op):
        monkeypatch.setattr(module, "why_not_triton", lambda *_, **__: None)


@interpreted
@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    used, real = [], decode.kernels
    monkeypatch.setattr(decode, "kernels", lambda name: used.append(name) or real(name))
    # Prompts are read in eager PyTorch.
    monkeypatch.setattr(local.LocalAttention, "_windowed", _eager_windowed)
    monkeypatch.setattr(mixture, "window_attention_with_lse", tiled_window_attention_with_lse)
    # From 12 and 9 tokens on: enough steps to flush both batch rows' buffers, and one more.
    monkeypatch.setattr(linear, "FEATURE_SLOTS", 4)
    monkeypatch.setattr(write_buffer, "TOKEN_SLOTS", 16)  # the smallest size of a product
    steps = {"linformer": 8}.get(CASES[name][0], 5)
    compare(name, dtype, "cpu", steps)
    assert len(used) == (0 if name in EAGER else steps)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token shift, convolution, norms and gates inside the kernels: logits and state as `extend` has them.

    Attention and feed-forward layers run in parallel, and some features of the local heads are rotated.
    """
    parts = [{"mechanism": "local", "window": 7, "num_heads": 2}, {"mechanism": "delta", "num_heads": 2}]
    attention = AttentionConfig(
        num_heads=4,
        head_dim=6,
        mechanism={"mechanism": "split", "parts": parts},
        rotary=("halves", "none"),
        rotary_dim=4,
        qk_norm=True,
        conv_size=4,
        out_norm=True,
        out_gate="silu",
        value_gates=True,
    )
    feed_forward = FeedForwardConfig(mult=2, activation="relu2")
    sizes = {"dim": 23, "depth": 2, "vocab_size": 37, "token_shift": (0, 1, 3), "norm": "rms", "residual": "parallel"}
    lm = LanguageModel(ModelConfig(causal=True, attention=attention, feed_forward=feed_forward, **sizes)).eval()
    tokens, used, real = torch.randint(37, (2, 13)), [], decode.kernels
    with torch.no_grad():
        full, after = lm.extend(tokens, lm.new_state(2))
        _, state = lm.extend(tokens[:, :8], lm.new_state(2))
        for module in (decode, gated, local, residual, window_op):
            monkeypatch.setattr(module, "why_not_triton", lambda *_, **__: None)
        monkeypatch.setattr(decode, "kernels", lambda name: used.append(name) or real(name))
        stack = lm.transformer.stack
        state = stack.decode_state(state.clone(), torch.float32)
        for i in range(8, 13):
            out, state = lm.decode_step(tokens[:, i], state)
            torch.testing.assert_close(out, full[:, i], rtol=1e-5, atol=1e-5)
    layer = ["gemv", "heads", "window", "gated", "heads", "gemv"]
    assert used[:8] == [*layer, "gemv", "gemv"]
    assert len(used) == 5 * (2 * 8 + 1)
    finished = stack.finish_decode(state).tensors()
    for name, x in after.tensors().items():
        torch.testing.assert_close(finished[name], x, rtol=1e-4, atol=1e-5)


def _eager_windowed(self, q, k, v, window, **how):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_op, "why_not_triton", lambda *_, **__: "disabled")
        how.pop("bounds", None)
        return local.window_attention(q, k, v, window, scale=self.scale, **how)


@by_name
@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("begun", [2, 9])
def test_an_eager_step_is_write_and_read(name: str, B: int, begun: int) -> None:
    """`decode_step` in float64 with rotary angles equals `step` of rotated queries and keys."""
    built = mechanism(name).double()
    with torch.no_grad():
        options = {"gates": gates(built, B, begun, torch.float64, "cpu")}
        x = inputs(name, B, begun, torch.float64, "cpu")
        state = built.extend(built.new_state(B, dtype=torch.float64), *x, **options)[1]
        ours = _with_length(state.clone(), state.length.clone())
        for i in range(4):
            q, k, v = inputs(name, B, 1, torch.float64, "cpu")
            angles, raw = rotary(ours.length, i % 5), gates(built, B, 1, torch.float64, "cpu")
            out, ours = built.decode_step(ours, q, k, v, gates=raw, rotary=angles)
            ours.length.add_(1)
            expected, state = built.step(state, *decode.apply_rotary(angles, q, k), v, gates=raw)
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
            for found, exact in zip(ours.tensors().values(), state.tensors().values(), strict=True):
                size = max(1.0, exact.abs().max().item())
                torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9 * size)


def test_a_growing_state_is_returned() -> None:
    built = mechanism("linear")
    assert type(built)._decode_step is not Mechanism._decode_step
    from longspan import build_mechanism

    softmax = build_mechanism("softmax", 2, D)
    q, k, v = (torch.randn(1, 1, 2, D) for _ in range(3))
    with torch.no_grad():
        _, state = softmax.decode_step(softmax.new_state(1), q, k, v)
    assert state.k.shape[2] == 1
    assert state.length.tolist() == [0]


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_a_query_offset_runs_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan import build_mechanism

    monkeypatch.setattr(decode, "kernels", lambda _: pytest.fail("the kernel has no query_offset"))
    built = build_mechanism("local", 2, D, window=5, query_offset=3).eval()
    with torch.no_grad():
        q, k, v = (torch.randn(1, 1, 2, D) for _ in range(3))
        state = built.step(built.new_state(1), q, k, v)[1]
        expected = built.step(state.clone(), q, 2 * k, -v)[0]
        assert torch.equal(built.decode_step(state, q, 2 * k, -v)[0], expected)


def test_doubled_angles_rotate_as_others_do() -> None:
    """`cos_sin_at` returns doubled angles, which rotate in fewer operations."""
    length, x = torch.tensor([3, 1_000_003]), torch.randn(2, 1, 3, D, dtype=torch.float64)
    ours = decode.cos_sin_at(length, (D, 100.0), torch.float64)
    assert ours.doubled is not None
    for interleaved in (False, True):
        other = decode.CosSin(*cos_sin(length[:, None], D, 100.0, torch.float64), interleaved)
        found, expected = ours._replace(interleaved=interleaved).rotate(x), other.rotate(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert ours.rotate(x.float()).dtype == torch.float32


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 2, 4)
    assert "CUDA" in str(decode.why_not_triton(x, x, x))
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for version, reason in (("3.3.1", "triton 3.3.1 is older than 3.4: install torch 2.8 or newer"), ("3.10.0", None)):
        monkeypatch.setattr(triton, "__version__", version)
        assert dispatch._find_missing(torch.device("cuda")) == reason
