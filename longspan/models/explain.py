"""Which implementation runs a call, and why: `longspan.explain`.

The call itself is made, on meta tensors that pretend to be on the device, and its operations record what they decide
(`dispatch.recording`). No kernel is launched, and the device need not exist.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from longspan.layout import Packing, TokenLayout
from longspan.mechanisms import build_mechanism
from longspan.models.layers import Attention
from longspan.ops.common import dispatch
from longspan.ops.common.dispatch import Decision
from longspan.protocol import Mechanism
from longspan.utils import check_integer, choose

_FLOATING_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.rand, torch.randn)
_SHOWN = {"torch": "in eager PyTorch", "sdpa": "on PyTorch's kernels (scaled_dot_product_attention)"}


@dataclass(frozen=True)
class Explanation:
    """What runs a call.

    Attributes:
        call: The shapes, dtype and device.
        layers: The decisions of each attention layer by name, "" for a mechanism, in the order of the operations.
    """

    call: str
    layers: dict[str, tuple[Decision, ...]]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of all layers, each one once."""
        return tuple(dict.fromkeys(decision for found in self.layers.values() for decision in found))

    @property
    def on_kernels(self) -> bool:
        """Whether all operations run on kernels, Triton's or PyTorch's own."""
        return all(decision.algorithm != dispatch.TORCH for decision in self.decisions)

    def __str__(self) -> str:
        lines = [self.call]
        for found, group in groupby(self.layers.items(), key=lambda item: item[1]):
            names = [name for name, _ in group]
            if names != [""]:
                lines.append(
                    f"  {names[0]}" if len(names) == 1 else f"  {names[0]} … {names[-1]} ({len(names)} layers)"
                )
            lines += [f"  {'' if names == [''] else '  '}{_sentence(decision)}" for decision in found]
        return "\n".join(lines)


def explain(
    target: str | nn.Module,
    batch_size: int = 1,
    length: int = 8192,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    key_length: int | None = None,
    causal: bool | None = None,
    training: bool = False,
    decode: bool = False,
    padded: bool = False,
    packed: Sequence[int] | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cuda",
    **options: Any,
) -> Explanation:
    """Report which implementation would run a call, and why.

    The decision is that of the call itself: the mechanism or layer runs on tensors without data, and every operation
    records which kernel it chooses. On a machine without a GPU, device "cuda" is a GPU of compute capability 9.0 with
    Triton; with one, it is that of the machine.

    Args:
        target: The name of a mechanism, a mechanism, or a module whose attention layers are explained one by one.
        batch_size: B. With `packed` it is 1.
        length: T, the number of tokens; with `decode`, of tokens before the step.
        num_heads: H of a mechanism given by name, 8 unless given.
        head_dim: D of a mechanism given by name, 64 unless given.
        key_length: S of cross-attention; T unless given.
        causal: Whether a mechanism is causal; True unless given, where it can be. Layers have a mode of their own.
        training: Whether dropout is active and gradients are computed.
        decode: Explain a step of the decode loop instead of a call on all tokens.
        padded: Whether there is a key_mask that hides the last token of each row.
        packed: Lengths of sequences packed into one row; their sum replaces `length`.
        dtype: Dtype of inputs and parameters.
        device: "cuda" or "cpu".
        **options: Options of a mechanism given by name, num_kv_heads and value_dim included.

    Raises:
        ValueError: If the arguments exclude each other, or the call itself refuses them.
    """
    call = _Call(batch_size, length, key_length, causal, training, decode, padded, packed, dtype, device)
    shape = {name: x for name, x in (("num_heads", num_heads), ("head_dim", head_dim)) if x is not None}
    if isinstance(target, str):
        target = build_mechanism(target, **{"num_heads": 8, "head_dim": 64} | shape, **options)
    elif given := ", ".join([*shape, *options]):
        raise ValueError(f"options are for a mechanism given by name, got {given} for a module")
    if not isinstance(target, nn.Module):
        raise TypeError(f"target must be the name of a mechanism or a module, got {target!r}")
    targets = {"": target} if isinstance(target, Mechanism | Attention) else dict(_attention_layers(target))
    if not targets:
        raise ValueError(f"{type(target).__name__} has no attention layer of longspan to explain")
    if key_length is not None and not any(isinstance(each, Mechanism) or each.cross for each in targets.values()):
        raise ValueError("key_length is for cross-attention, which there is none of: leave it out")
    if decode:  # An encoder does not.
        targets = {name: x for name, x in targets.items() if isinstance(x, Mechanism) or x.causal or x.cross}
        if not targets:
            raise ValueError("bidirectional attention has no decode step: leave out decode")
    return Explanation(str(call), {name: tuple(call.decisions(each)) for name, each in targets.items()})


def _attention_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attention layers of a module by name, and mechanisms outside of such layers."""
    inside: tuple[str, ...] = ()
    for name, each in module.named_modules():
        if isinstance(each, Mechanism | Attention) and not name.startswith(inside or ("\0",)):
            inside = *inside, f"{name}."
            yield name, each


class _Call:
    """The arguments of a call on tensors without data."""

    def __init__(
        self,
        batch_size: int,
        length: int,
        key_length: int | None,
        causal: bool | None,
        training: bool,
        decode: bool,
        padded: bool,
        packed: Sequence[int] | None,
        dtype: torch.dtype | str,
        device: torch.device | str,
    ) -> None:
        check_integer("batch_size", batch_size, 1)
        check_integer("length", length, 1)
        if key_length is not None:
            check_integer("key_length", key_length, 1)
        if packed is not None and (padded or decode or batch_size != 1 or key_length is not None):
            raise ValueError("packed sequences are one row of tokens: leave out batch_size, padded, decode, key_length")
        if decode and (padded or training or key_length is not None or causal is False):
            raise ValueError("a decode step is causal, of one token: leave out padded, training, key_length and causal")
        self.packing = None if packed is None else Packing.from_lengths(packed)
        self.packed = None if packed is None else list(packed)
        self.batch_size, self.length = batch_size, length if packed is None else sum(packed)
        self.key_length, self.causal = self.length if key_length is None else key_length, causal
        self.training, self.decode, self.padded = training, decode, padded
        self.dtype = _dtype(dtype)
        kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
        self.device = torch.device("cuda:0" if choose("device", kind, ("cpu", "cuda")) == "cuda" else "cpu")

    def __str__(self) -> str:
        tokens = f"packed sequences of {self.packed}" if self.packed else f"{self.batch_size} × {self.length} tokens"
        tokens = f"a decode step after {tokens}" if self.decode else tokens
        tokens += f" to {self.key_length} keys" if self.key_length != self.length else ""
        words = [tokens, str(self.dtype).removeprefix("torch."), f"on {self.device.type}"]
        words += ["training"] * self.training + ["padded"] * self.padded
        return f"{', '.join(words)}:"

    def decisions(self, target: nn.Module) -> list[Decision]:
        """Return what the operations of a mechanism or layer decide."""
        twin = _without_data(target, self.dtype).train(self.training)
        hypothetical = self.device.type == "cuda" and not torch.cuda.is_available()
        with _recording(hypothetical) as found, _OnDevice(self.device), torch.set_grad_enabled(self.training):
            if isinstance(twin, Attention):
                self._call_layer(twin)
            else:
                assert isinstance(twin, Mechanism)
                self._call_mechanism(twin, self._is_causal(twin))
        nothing = Decision("attention", dispatch.TORCH, "it calls no operation that has kernels")
        return found.decisions or [nothing]

    def _is_causal(self, mechanism: Mechanism) -> bool:
        asked = self.causal if self.causal is not None else self.key_length == self.length
        return asked and (self.causal is True or mechanism.supports_causal)

    def _call_layer(self, layer: Attention) -> None:
        if self.causal is not None and self.causal != layer.causal:
            kind = "causal" if layer.causal else "bidirectional"
            raise ValueError(f"the layer is {kind}: leave out causal, got {self.causal}")
        if self.decode:
            self._call_step(layer.mechanism, reads=layer.cross)
            return
        x = self._empty(self.batch_size, self.length, layer.dim)
        if layer.value_embedding is not None:
            layout = TokenLayout.of(x, causal=layer.causal, key_mask=self._mask(), packing=self.packing)
            tokens = torch.zeros(self.batch_size, self.length, dtype=torch.int64)
            layer(x, _layouts=(replace(layout, tokens=tokens), None))
            return
        context = self._empty(self.batch_size, self.key_length, layer.to_kv.in_features) if layer.cross else None
        masks = {"context_mask" if layer.cross else "key_mask": self._mask()}
        layer(x, context=context, packing=self.packing, **masks)

    def _call_mechanism(self, mechanism: Mechanism, causal: bool) -> None:
        if self.decode:
            self._call_step(mechanism)
            return
        q, k, v, gates = self._tensors(mechanism, self.length, self.key_length)
        mechanism(q, k, v, gates=gates, causal=causal, key_mask=self._mask(), packing=self.packing)

    def _call_step(self, mechanism: Mechanism, *, reads: bool = False) -> None:
        """Make a step of the decode loop; one of cross-attention only reads."""
        q, k, v, gates = self._tensors(mechanism, 1, 1)
        state = mechanism.new_state(self.batch_size, device=self.device, dtype=self.dtype)
        if reads:
            mechanism.read(state, q)
            return
        state = mechanism.decode_state(state.reserve(self.length + 1), self.dtype)
        mechanism.decode_step(state, q, k, v, gates=gates)

    def _tensors(self, mechanism: Mechanism, tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v and gates without data."""
        q = self._empty(self.batch_size, tokens, mechanism.num_heads, mechanism.head_dim)
        rows = self.batch_size, keys, mechanism.num_kv_heads
        k, v = self._empty(*rows, mechanism.head_dim), self._empty(*rows, mechanism.value_dim)
        return q, k, v, self._empty(*rows, mechanism.num_gates) if mechanism.num_gates else None

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _mask(self) -> Tensor | None:
        return torch.arange(self.key_length).expand(self.batch_size, -1) < self.key_length - 1 if self.padded else None


def _dtype(given: torch.dtype | str) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    found = getattr(torch, choose("dtype", given, ("bfloat16", "float16", "float32", "float64")))
    assert isinstance(found, torch.dtype)
    return found


def _without_data(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a module whose floating-point tensors are of this dtype and have no data."""
    tensors = {id(x): x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()}
    empty = {key: torch.empty(x.shape, dtype=dtype, device="meta") for key, x in tensors.items()}
    memo: dict[int, Any] = {
        key: nn.Parameter(x, requires_grad=False) if isinstance(tensors[key], nn.Parameter) else x
        for key, x in empty.items()
    }
    return copy.deepcopy(module, memo)


@contextmanager
def _recording(hypothetical: bool) -> Iterator[dispatch.Recording]:
    dispatch.recording = found = dispatch.Recording(hypothetical)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield found
    finally:
        dispatch.recording = None


class _OnDevice(TorchFunctionMode):
    """Floating-point tensors are on the meta device and pretend to be on another one; integers have values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        cuda = device.type == "cuda"
        answers = {"device": device, "is_cuda": cuda, "is_cpu": not cuda, "is_meta": False}
        # Nothing is known about values.
        self._answers = {torch.equal: False, **{getattr(Tensor, name).__get__: x for name, x in answers.items()}}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._answers:
            return self._answers[func]
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function with its tensors on the meta device if one of them is there or will be."""
    meta = _makes_floats(func, kwargs)

    def look(x: Any) -> Any:
        nonlocal meta
        meta = meta or (isinstance(x, Tensor) and x.is_meta)
        return x

    tree_map(look, (args, kwargs))
    place = torch.device("meta" if meta else "cpu")

    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to("meta") if meta and not x.is_meta else x
        return place if isinstance(x, torch.device) else x

    args, kwargs = tree_map(move, (args, kwargs))
    if kwargs.get("device") is not None or func in _FLOATING_FACTORIES:
        kwargs["device"] = place
    return func(*args, **kwargs)


def _makes_floats(func: Any, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    return func in _FLOATING_FACTORIES and (dtype is None or dtype.is_floating_point)


def _sentence(decision: Decision) -> str:
    runs = _SHOWN.get(decision.algorithm, f"on Triton kernels ({decision.algorithm})")
    return f"{decision.operation} runs {runs}{'' if decision.why is None else f': {decision.why}'}"
