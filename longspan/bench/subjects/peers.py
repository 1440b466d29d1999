"""The older packages, each behind a small adapter that hands it tensors in its own layout.

Every adapter says which of our mechanisms computes the same (`twin`), with the peer's weights: before a peer is timed
it is compared with its twin in float64, so that what is timed is known to be the same function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.bench.runner import Case, Check, Status, Subject, Work
from longspan.bench.subjects.mechanisms import attention_work, random_qkv, relative_error, small, trained
from longspan.mechanisms import build_mechanism
from longspan.mechanisms.feature_maps import Favor
from longspan.mechanisms.linformer import LinformerAttention
from longspan.protocol import Mechanism


class Peer(nn.Module, ABC):
    """One way of calling one package. Built for a case; `forward` takes what `arrange` gives, and only it is timed."""

    mechanism: ClassVar[str]
    package: ClassVar[str]
    mode: ClassVar[bool | None] = None  # True: measured in causal runs only; False: in bidirectional ones
    not_causal: ClassVar[str] = ""  # why it cannot be measured causally
    not_on_cpu: ClassVar[str] = ""  # why it is measured on CUDA only
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def __init__(self, case: Case) -> None:
        super().__init__()

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q, k, v (B, T, H, D) in the package's own layout, here (B, H, T, D)."""
        return [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def out_shape(self, leaves: Sequence[Tensor]) -> Sequence[int]:
        """The shape of its output for what `arrange` gave, by default that of the values."""
        return leaves[-1].shape

    def restore(self, out: Tensor) -> Tensor:
        """Its output as (B, T, H, E)."""
        return out.transpose(1, 2)

    def compared(self, out: Tensor) -> Tensor:
        """The part of an output (B, T, H, E) in which peer and twin should agree."""
        return out

    @abstractmethod
    def twin(self, case: Case) -> Mechanism:
        """Our mechanism that computes the same, with this peer's weights."""


class Sdpa(Peer):
    mechanism, package = "softmax", "torch"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.causal = case.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def twin(self, case: Case) -> Mechanism:
        return build_mechanism("softmax", case.num_heads, case.head_dim)


class LinearAttentionTransformer(Peer):
    mechanism, package = "linear", "linear-attention-transformer"
    mode = False
    options: ClassVar[dict[str, Any]] = {"normalize": "feature"}
    scaled: ClassVar[bool] = True  # by D^−½, which cancels where a query's weights are divided by their sum

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.functions = import_module("linear_attention_transformer.linear_attention_transformer")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.functions.linear_attn(q, k, v)

    def twin(self, case: Case) -> Mechanism:
        scale = case.head_dim**-0.5 if self.scaled else 1.0
        return build_mechanism(
            "linear", case.num_heads, case.head_dim, feature_map="softmax", output_scale=scale, **self.options
        )


class BlindSpot1(LinearAttentionTransformer):
    mode, scaled = True, False
    options: ClassVar[dict[str, Any]] = {"blind_spot": 1}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.functions.causal_linear_attn(q, k, v, bucket_size=self.options["blind_spot"])


class BlindSpot64(BlindSpot1):
    options: ClassVar[dict[str, Any]] = {"blind_spot": 64, "first_bucket": "zero"}


class FlashLinearAttention(Peer):
    """Its chunked linear attention; the feature maps stand outside of its kernel."""

    mechanism, package = "linear", "flash-linear-attention"
    mode = True
    not_on_cpu = "flash-linear-attention has no CPU path"
    tolerance = 5e-3  # Its products of float32 are those of tf32.

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.attend = import_module("fla.ops.linear_attn").chunk_linear_attn

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [q, k, v]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q.softmax(-1), k.exp(), v, normalize=True)[0]

    def restore(self, out: Tensor) -> Tensor:
        return out

    def twin(self, case: Case) -> Mechanism:
        return build_mechanism("linear", case.num_heads, case.head_dim, feature_map="softmax")


class PerformerPytorch(Peer):
    mechanism, package = "performer", "performer-pytorch"
    tolerance = 1e-3  # Its causal form adds a second epsilon, 1e-6, to the sum of keys.

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.causal = case.causal
        package = import_module("performer_pytorch")
        self.attention = package.FastAttention(case.head_dim, nb_features=256, causal=case.causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)

    def compared(self, out: Tensor) -> Tensor:
        # Its causal form lets the future move the past; only the last token has no future.
        return out[:, -1:] if self.causal else out

    def twin(self, case: Case) -> Mechanism:
        twin = build_mechanism("performer", case.num_heads, case.head_dim, num_features=256, epsilon=1e-4)
        assert isinstance(twin.feature_map, Favor)
        twin.feature_map.projection.copy_(self.attention.projection_matrix)
        return twin


class LocalAttention(Peer):
    """Its window_size=256 with exact_windowsize sees 257 keys, and so does its twin."""

    mechanism, package = "local", "local-attention"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.attention = import_module("local_attention").LocalAttention(
            256,
            causal=case.causal,
            look_backward=1,
            exact_windowsize=True,
            use_rotary_pos_emb=False,
            autopad=case.length % 256 > 0,  # Its last slice would cost it a copy where nothing was padded.
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)

    def twin(self, case: Case) -> Mechanism:
        return build_mechanism("local", case.num_heads, case.head_dim, window=257)


class FlexAttention(Peer):
    """A sliding window by FlexAttention, compiled; its block mask is made beforehand."""

    mechanism, package = "local", "torch"
    not_on_cpu = "FlexAttention's kernels are for CUDA; elsewhere it makes all n² scores"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        flex = import_module("torch.nn.attention.flex_attention")

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < 257) if case.causal else (i - j).abs() < 257

        compiled = case.device == "cuda"
        # Not compiled, making the mask takes all n² of it.
        make = torch.compile(flex.create_block_mask) if compiled else flex.create_block_mask
        self.mask = make(sees, None, None, case.length, case.length, device=case.device)
        self.attend = torch.compile(flex.flex_attention, dynamic=False) if compiled else flex.flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, block_mask=self.mask)

    def twin(self, case: Case) -> Mechanism:
        return build_mechanism("local", case.num_heads, case.head_dim, window=257)


class _Given(nn.Module):
    """Stands where a layer has a linear map, and returns the tensor it was given: what is left is the attention."""

    tensor: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor


class Linformer(Peer):
    """Its self-attention layer without the maps to queries, keys and values, and from heads back."""

    mechanism, package = "linformer", "linformer"
    not_causal = "linformer has no causal mode"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.num_heads, dim = case.num_heads, case.num_heads * case.head_dim
        layer = import_module("linformer").LinformerSelfAttention(dim, case.length, k=256, heads=case.num_heads)
        layer.to_q, layer.to_k, layer.to_v, layer.to_out = nn.Identity(), _Given(), _Given(), nn.Identity()
        self.layer = layer

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [x.flatten(2) for x in (q, k, v)]  # (B, T, H·D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.layer.to_k.tensor, self.layer.to_v.tensor = k, v
        return self.layer(q)

    def restore(self, out: Tensor) -> Tensor:
        return out.unflatten(2, (self.num_heads, -1))

    def twin(self, case: Case) -> Mechanism:
        return _with_tables(case, self.layer.proj_k, self.layer.proj_v)


class LinformerPytorch(Peer):
    """Its multi-head attention without the linear maps; it takes the heads one after another, each as (B, T, D)."""

    mechanism, package = "linformer", "linformer-pytorch"
    not_causal = "linformer-pytorch's causal mode sees the future"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.num_heads = case.num_heads
        self.layer = import_module("linformer_pytorch.linformer_pytorch").MHAttention(
            input_size=case.length,
            dim=case.head_dim,
            channels=case.num_heads * case.head_dim,
            dim_k=256,
            nhead=case.num_heads,
            dropout=0.0,
            checkpoint_level="C0",
            parameter_sharing="headwise",
            E_proj=None,
            F_proj=None,
            full_attention=False,
            causal_mask=None,
        )
        for name in ("to_q", "to_k", "to_v"):
            setattr(self.layer, name, nn.ModuleList(_Given() for _ in range(case.num_heads)))
        self.layer.w_o = nn.Identity()
        # It asks its input for its shape only.
        self.shape = torch.empty(case.batch_size, case.length, self.layer.channels, device="meta")

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [x[:, :, head].contiguous() for x in (q, k, v) for head in range(self.num_heads)]

    def out_shape(self, leaves: Sequence[Tensor]) -> Sequence[int]:
        return self.shape.shape

    def forward(self, *heads: Tensor) -> Tensor:
        places = [*self.layer.to_q, *self.layer.to_k, *self.layer.to_v]
        for place, tensor in zip(places, heads, strict=True):
            place.tensor = tensor
        return self.layer(self.shape)

    def restore(self, out: Tensor) -> Tensor:
        return out.unflatten(2, (self.num_heads, -1))

    def twin(self, case: Case) -> Mechanism:
        head = self.layer.heads[0]
        twin = _with_tables(case, head.E.weight.T, head.F.weight.T, bias=True)
        for mine, linear in ((twin.keys, head.E), (twin.values, head.F)):
            assert mine.bias is not None
            mine.bias.data.copy_(linear.bias[:, None])
        return twin


def _with_tables(case: Case, keys: Tensor, values: Tensor, bias: bool = False) -> LinformerAttention:
    twin = LinformerAttention(case.num_heads, case.head_dim, rank=256, max_length=case.length, bias=bias)
    twin.keys.table.data.copy_(keys[None])
    twin.values.table.data.copy_(values[None])
    return twin


PEERS: dict[str, type[Peer]] = {
    "linear-attention-transformer": LinearAttentionTransformer,
    "linear-attention-transformer, blind spot 64": BlindSpot64,
    "linear-attention-transformer, blind spot 1": BlindSpot1,
    "flash-linear-attention, softmax map": FlashLinearAttention,
    "performer-pytorch, 256 features": PerformerPytorch,
    "local-attention, 257 keys": LocalAttention,
    "FlexAttention, 257 keys": FlexAttention,
    "linformer, k 256": Linformer,
    "linformer-pytorch, k 256": LinformerPytorch,
    "PyTorch SDPA": Sdpa,
}


@dataclass(frozen=True)
class Theirs(Subject):
    """A peer, by its name in `PEERS`."""

    @property
    def package(self) -> str:
        return PEERS[self.name].package

    def unfit(self, case: Case) -> tuple[Status, str] | None:
        peer = PEERS[self.name]
        if case.causal and peer.not_causal:
            return "not supported", peer.not_causal
        if case.device == "cpu" and peer.not_on_cpu:
            return "not supported", peer.not_on_cpu
        if installed_version(peer.package) is None:
            return "not installed", not_installed(peer.package)
        return None

    def work(self, case: Case) -> Work:
        with torch.device(case.device):
            peer = PEERS[self.name](case).to(case.torch_dtype)
            leaves = [x.detach().requires_grad_() for x in peer.arrange(*random_qkv(case))]
            gradient = torch.randn(*peer.out_shape(leaves)).to(case.torch_dtype)
        return attention_work(lambda: [peer(*leaves)], [*leaves, *trained(peer)], [gradient])

    def check(self, case: Case) -> Check:
        """Its output in float32 against our mechanism in float64, with its weights."""
        case = small(replace(case, dtype="float32"))
        peer = PEERS[self.name](case)
        twin = peer.twin(case).double().eval().to(case.device)
        peer = peer.to(case.device)
        q, k, v = random_qkv(case)
        with torch.no_grad():
            theirs = peer.restore(peer(*peer.arrange(q, k, v)))
            truth = twin(q.double(), k.double(), v.double(), causal=case.causal)
        error = relative_error([peer.compared(theirs)], [peer.compared(truth)])
        return Check(error, peer.tolerance, f"our {peer.mechanism} in float64")


def peers(mechanism: str, case: Case) -> list[Theirs]:
    """The peers of a mechanism in this mode, those that are not installed included."""
    return [
        Theirs(name) for name, peer in PEERS.items() if peer.mechanism == mechanism and peer.mode in (None, case.causal)
    ]


def not_installed(package: str) -> str:
    """What to do about a package that is not there."""
    extra = package if package == "flash-linear-attention" else "'longspan[parity]'"
    return f"{package} is not installed: pip install {extra}"


def installed_version(package: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
