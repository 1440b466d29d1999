"""The peers: other implementations that longspan is compared with, each behind an adapter to its own layout.

There are three kinds: `MECHANISM_PEERS` (attention on q, k, v), `LAYER_PEERS` (layers on x) and `MODEL_PEERS` (language
models on tokens). To add a peer, write an adapter and name it in one of these tables. Before a peer is timed its
outputs are compared with longspan's in float64, with the peer's weights, so that both compute the same function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.bench.subjects.base import Case, Status
from longspan.mechanisms import build_mechanism
from longspan.mechanisms.feature_maps import Favor
from longspan.mechanisms.linformer import LinformerAttention
from longspan.protocol import Mechanism

SDPA = "PyTorch SDPA"
VOCABULARY = 256
NEW_TOKENS = 64  # capacity reserved after a prompt

# Distributions by name: what `pip install` takes to get them.
PACKAGES = {
    "torch": "torch",
    "flash-linear-attention": "flash-linear-attention",
    "transformers": "'longspan[hf]'",
    **dict.fromkeys(
        ("linear-attention-transformer", "performer-pytorch", "local-attention", "linformer", "linformer-pytorch"),
        "'longspan[parity]'",
    ),
}


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def unavailable(package: str, case: Case, *, not_causal: str = "", not_on_cpu: str = "") -> tuple[Status, str] | None:
    """Return why a package cannot run a case, or None.

    Args:
        package: A distribution of `PACKAGES`.
        case: The case.
        not_causal: Why the package is not measured causally, if it is not.
        not_on_cpu: Why the package is measured on CUDA only, if it is.
    """
    if case.causal and not_causal:
        return "not supported", not_causal
    if case.device == "cpu" and not_on_cpu:
        return "not supported", not_on_cpu
    if installed_version(package) is None:
        return "not installed", f"{package} is not installed: pip install {PACKAGES[package]}"
    return None


class MechanismPeer(nn.Module):
    """Attention of another package, built for a case. Only `forward`, on what `arrange` returns, is timed.

    Attributes:
        mechanism: The mechanism it is compared with.
        package: Its distribution.
        only_causal: True to measure it in causal cases only, False in bidirectional cases only, None in both.
        not_causal: Why it is not measured causally.
        not_on_cpu: Why it is measured on CUDA only.
        tolerance: The largest relative error against the equivalent mechanism.
        options: Options of the equivalent mechanism.
    """

    mechanism: ClassVar[str]
    package: ClassVar[str]
    only_causal: ClassVar[bool | None] = None
    not_causal: ClassVar[str] = ""
    not_on_cpu: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-4
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Convert q, k, v (B, T, H, D) to the package's layout, by default (B, H, T, D)."""
        return [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def out_shape(self, leaves: Sequence[Tensor]) -> Sequence[int]:
        """Return the shape of the output for the tensors that `arrange` returned."""
        return leaves[-1].shape

    def restore(self, out: Tensor) -> Tensor:
        """Convert the output to (B, T, H, E)."""
        return out.transpose(1, 2)

    def compared(self, out: Tensor) -> Tensor:
        """Return the part of an output (B, T, H, E) that must agree with the equivalent mechanism."""
        return out

    def equivalent(self) -> Mechanism:
        """Return longspan's mechanism that computes the same function, with this peer's weights."""
        return build_mechanism(self.mechanism, self.case.num_heads, self.case.head_dim, **self.options)


class SdpaPeer(MechanismPeer):
    """Full attention by PyTorch's scaled_dot_product_attention."""

    mechanism, package = "softmax", "torch"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.case.causal)


class LinearAttentionTransformerPeer(MechanismPeer):
    """Its bidirectional linear attention."""

    mechanism, package = "linear", "linear-attention-transformer"
    only_causal = False
    options: ClassVar[dict[str, Any]] = {"feature_map": "softmax", "normalize": "feature"}

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.functions = import_module("linear_attention_transformer.linear_attention_transformer")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.functions.linear_attn(q, k, v)

    def restore(self, out: Tensor) -> Tensor:
        # It scales by D^−½, which has no effect where the weights of a query are normalized.
        return super().restore(out) * (out.shape[-1] ** 0.5 if self.options.get("normalize") == "feature" else 1.0)


class BlindSpot1Peer(LinearAttentionTransformerPeer):
    """Its causal linear attention."""

    only_causal = True
    options: ClassVar[dict[str, Any]] = {"feature_map": "softmax", "blind_spot": 1}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.functions.causal_linear_attn(q, k, v, bucket_size=self.options["blind_spot"])


class BlindSpot64Peer(BlindSpot1Peer):
    """Its causal linear attention in buckets of 64 tokens, where a query attends to the buckets before its own."""

    options: ClassVar[dict[str, Any]] = {"feature_map": "softmax", "blind_spot": 64, "first_bucket": "zero"}


class FlashLinearAttentionPeer(MechanismPeer):
    """Its chunked linear attention, with feature maps outside of its kernel."""

    mechanism, package = "linear", "flash-linear-attention"
    only_causal = True
    not_on_cpu = "flash-linear-attention has no CPU path"
    tolerance = 5e-3  # It multiplies float32 in TF32.
    options: ClassVar[dict[str, Any]] = {"feature_map": "softmax"}

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.attend = import_module("fla.ops.linear_attn").chunk_linear_attn

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [q, k, v]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q.softmax(-1), k.exp(), v, normalize=True)[0]

    def restore(self, out: Tensor) -> Tensor:
        return out


class PerformerPytorchPeer(MechanismPeer):
    """Its FAVOR+ attention with 256 random features."""

    mechanism, package = "performer", "performer-pytorch"
    options: ClassVar[dict[str, Any]] = {"num_features": 256, "epsilon": 1e-4}
    tolerance = 1e-3  # Its causal form adds a second epsilon, 1e-6, to the sum of keys.

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        package = import_module("performer_pytorch")
        self.attention = package.FastAttention(case.head_dim, nb_features=256, causal=case.causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)

    def compared(self, out: Tensor) -> Tensor:
        # Its causal form leaks the future into the past; only the last token is exact.
        return out[:, -1:] if self.case.causal else out

    def equivalent(self) -> Mechanism:
        mechanism = super().equivalent()
        assert isinstance(mechanism.feature_map, Favor)
        mechanism.feature_map.projection.copy_(self.attention.projection_matrix)
        return mechanism


class LocalAttentionPeer(MechanismPeer):
    """Its window_size=256 with exact_windowsize attends to 257 keys."""

    mechanism, package = "local", "local-attention"
    options: ClassVar[dict[str, Any]] = {"window": 257}

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.attention = import_module("local_attention").LocalAttention(
            256,
            causal=case.causal,
            look_backward=1,
            exact_windowsize=True,
            use_rotary_pos_emb=False,
            autopad=case.length % 256 > 0,  # It copies the output even if no padding is needed.
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)


class FlexAttentionPeer(MechanismPeer):
    """A sliding window of compiled FlexAttention. Building its block mask is not timed."""

    mechanism, package = "local", "torch"
    not_on_cpu = "FlexAttention's kernels need CUDA; elsewhere it computes all n² scores"
    options: ClassVar[dict[str, Any]] = {"window": 257}

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        window = self.options["window"]
        flex = import_module("torch.nn.attention.flex_attention")

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < window) if case.causal else (i - j).abs() < window

        compiled = case.device == "cuda"
        # Without compilation create_block_mask materializes the n² mask.
        create = torch.compile(flex.create_block_mask) if compiled else flex.create_block_mask
        self.mask = create(sees, None, None, case.length, case.length, device=case.device)
        self.attend = torch.compile(flex.flex_attention, dynamic=False) if compiled else flex.flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, block_mask=self.mask)


class _FixedOutput(nn.Module):
    """Replaces a linear map and returns a given tensor, so that only the attention of a layer is timed."""

    tensor: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor


class LinformerPeer(MechanismPeer):
    """Its self-attention layer without the q, k, v and output projections."""

    mechanism, package = "linformer", "linformer"
    not_causal = "linformer has no causal mode"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        layer = import_module("linformer").LinformerSelfAttention(case.dim, case.length, k=256, heads=case.num_heads)
        layer.to_q, layer.to_k, layer.to_v, layer.to_out = nn.Identity(), _FixedOutput(), _FixedOutput(), nn.Identity()
        self.layer = layer

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [x.flatten(2) for x in (q, k, v)]  # (B, T, H·D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.layer.to_k.tensor, self.layer.to_v.tensor = k, v
        return self.layer(q)

    def restore(self, out: Tensor) -> Tensor:
        return out.unflatten(2, (self.case.num_heads, -1))

    def equivalent(self) -> Mechanism:
        return _linformer_with(self.case, self.layer.proj_k, self.layer.proj_v)


class LinformerPytorchPeer(MechanismPeer):
    """Its multi-head attention without the projections; it takes a list of heads, each (B, T, D)."""

    mechanism, package = "linformer", "linformer-pytorch"
    not_causal = "linformer-pytorch's causal mode sees the future"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        sizes = {"input_size": case.length, "dim": case.head_dim, "channels": case.dim, "nhead": case.num_heads}
        options = {"dim_k": 256, "dropout": 0.0, "checkpoint_level": "C0", "parameter_sharing": "headwise"}
        options |= {"E_proj": None, "F_proj": None, "full_attention": False, "causal_mask": None}
        self.layer = import_module("linformer_pytorch.linformer_pytorch").MHAttention(**sizes, **options)
        for name in ("to_q", "to_k", "to_v"):
            setattr(self.layer, name, nn.ModuleList(_FixedOutput() for _ in range(case.num_heads)))
        self.layer.w_o = nn.Identity()
        self.x = torch.empty(case.batch_size, case.length, case.dim, device="meta")  # only its shape is read

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [x[:, :, head].contiguous() for x in (q, k, v) for head in range(self.case.num_heads)]

    def out_shape(self, leaves: Sequence[Tensor]) -> Sequence[int]:
        return self.x.shape

    def forward(self, *heads: Tensor) -> Tensor:
        maps = [*self.layer.to_q, *self.layer.to_k, *self.layer.to_v]
        for linear_map, tensor in zip(maps, heads, strict=True):
            linear_map.tensor = tensor
        return self.layer(self.x)

    def restore(self, out: Tensor) -> Tensor:
        return out.unflatten(2, (self.case.num_heads, -1))

    def equivalent(self) -> Mechanism:
        head = self.layer.heads[0]
        mechanism = _linformer_with(self.case, head.E.weight.T, head.F.weight.T, bias=True)
        for projection, linear in ((mechanism.keys, head.E), (mechanism.values, head.F)):
            assert projection.bias is not None
            projection.bias.data.copy_(linear.bias[:, None])
        return mechanism


def _linformer_with(case: Case, keys: Tensor, values: Tensor, bias: bool = False) -> LinformerAttention:
    mechanism = LinformerAttention(case.num_heads, case.head_dim, rank=256, max_length=case.length, bias=bias)
    mechanism.keys.table.data.copy_(keys[None])
    mechanism.values.table.data.copy_(values[None])
    return mechanism


MECHANISM_PEERS: dict[str, type[MechanismPeer]] = {
    "linear-attention-transformer": LinearAttentionTransformerPeer,
    "linear-attention-transformer, blind spot 64": BlindSpot64Peer,
    "linear-attention-transformer, blind spot 1": BlindSpot1Peer,
    "flash-linear-attention, softmax map": FlashLinearAttentionPeer,
    "performer-pytorch, 256 features": PerformerPytorchPeer,
    "local-attention, 257 keys": LocalAttentionPeer,
    "FlexAttention, 257 keys": FlexAttentionPeer,
    "linformer, k 256": LinformerPeer,
    "linformer-pytorch, k 256": LinformerPytorchPeer,
    SDPA: SdpaPeer,
}


class LayerPeer(NamedTuple):
    """A layer class that a package and its drop-in replacement in `longspan.compat` both have.

    Attributes:
        mechanism: The mechanism it uses.
        package: Its distribution.
        class_name: The class, under the same name in the package and in `longspan.compat`.
        arguments: Its constructor arguments for a case.
        not_causal: Why it is not measured causally.
        leaks: The causal original leaks the future into the past, so that only its last token is exact.
    """

    mechanism: str
    package: str
    class_name: str
    arguments: Callable[[Case], Mapping[str, Any]]
    not_causal: str = ""
    leaks: bool = False

    def build(self, case: Case, *, ours: bool) -> nn.Module:
        """Build the original or, if `ours`, its replacement, in float32 on the case's device."""
        module = import_module(("longspan.compat." if ours else "") + self.package.replace("-", "_"))
        with torch.device(case.device):
            return getattr(module, self.class_name)(**self.arguments(case)).eval()


def _layer_sizes(case: Case) -> dict[str, Any]:
    return {"dim": case.dim, "heads": case.num_heads, "dim_head": case.head_dim}


def _linear_layer(case: Case) -> dict[str, Any]:
    options = {"max_seq_len": case.length, "depth": 1, "blindspot_size": 64 if case.causal else 1}
    return {**_layer_sizes(case), **options, "causal": case.causal}


def _linformer_pytorch_layer(case: Case) -> dict[str, Any]:
    sizes = {"channels": case.dim, "nhead": case.num_heads, "dim_d": case.head_dim, "input_size": case.length}
    return {**sizes, "dim_k": 256, "dropout": 0.0, "dropout_ff": 0.0}


LAYER_PEERS = {
    "linear-attention-transformer, with feed-forward": LayerPeer(
        "linear", "linear-attention-transformer", "LinearAttentionTransformer", _linear_layer
    ),
    "performer-pytorch, 256 features": LayerPeer(
        *("performer", "performer-pytorch", "SelfAttention"),
        lambda case: {**_layer_sizes(case), "causal": case.causal, "nb_features": 256},
        leaks=True,
    ),
    "local-attention, 257 keys": LayerPeer(
        *("local", "local-attention", "LocalMHA"),
        lambda case: {**_layer_sizes(case), "causal": case.causal, "window_size": 256, "exact_windowsize": True},
    ),
    "linformer, k 256, one shared head": LayerPeer(
        *("linformer", "linformer", "LinformerSelfAttention"),
        lambda case: {**_layer_sizes(case), "seq_len": case.length, "k": 256, "one_kv_head": True, "share_kv": True},
        LinformerPeer.not_causal,
    ),
    "linformer-pytorch, k 256, with feed-forward": LayerPeer(
        *("linformer", "linformer-pytorch", "Linformer"), _linformer_pytorch_layer, LinformerPytorchPeer.not_causal
    ),
}


class ModelPeer(ABC):
    """A language model of another package, or its replacement in `longspan.compat` with the same arguments.

    Attributes:
        mechanism: The mechanism it uses.
        package: Its distribution.
        library: Its module; if it has a replacement, `longspan.compat` has a module of the same name.
        replaced: `longspan.compat` has a replacement.
        leaks: The original leaks the future into the past, so that only the last token is exact.
        not_on_cpu: Why it is measured on CUDA only.
        tokens: Tokens generated per call; few where each token recomputes the prefix.
    """

    mechanism: ClassVar[str]
    package: ClassVar[str]
    library: ClassVar[str]
    replaced: ClassVar[bool] = True
    leaks: ClassVar[bool] = False
    not_on_cpu: ClassVar[str] = ""
    tokens: ClassVar[int] = 2

    def __init__(self, case: Case, *, ours: bool = False) -> None:
        self.net = self.build(case, import_module(f"longspan.compat.{self.library}" if ours else self.library))

    @abstractmethod
    def build(self, case: Case, library: Any) -> nn.Module:
        """Build the model from the classes of `library`."""

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        return self.net(tokens, return_loss=True)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        return getattr(self.net, "net", self.net)(tokens)

    def generate(self, prompt: Tensor, tokens: int) -> Tensor:
        """Return new tokens (B, tokens) after a prompt (B, T)."""
        return self.net.generate(prompt, tokens)  # type: ignore[operator]


def generate_greedily(model: nn.Module, prompt: Tensor, tokens: int) -> Tensor:
    """Return new tokens (B, tokens) after a prompt (B, T), generated by a model with the API of transformers."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, **options)[:, prompt.shape[1] :]  # type: ignore[operator]


def _model_sizes(case: Case) -> dict[str, int]:
    capacity = -(-(case.length + NEW_TOKENS) // 256) * 256  # a multiple of the window
    return {**_layer_sizes(case), "depth": case.depth, "num_tokens": VOCABULARY, "max_seq_len": capacity}


class LinearAttentionTransformerModelPeer(ModelPeer):
    """Linear and local attention, each with half of the heads."""

    mechanism, package, library = "linear", "linear-attention-transformer", "linear_attention_transformer"

    def build(self, case: Case, library: Any) -> nn.Module:
        local = {"n_local_attn_heads": case.num_heads // 2, "local_attn_window_size": 256}
        model = library.LinearAttentionTransformerLM(**_model_sizes(case), causal=True, blindspot_size=64, **local)
        return library.AutoregressiveWrapper(model)


class PerformerModelPeer(ModelPeer):
    """FAVOR+ and local attention, each with half of the heads."""

    mechanism, package, library = "performer", "performer-pytorch", "performer_pytorch"
    leaks = True

    def build(self, case: Case, library: Any) -> nn.Module:
        local = {"local_attn_heads": case.num_heads // 2, "local_window_size": 256}
        model = library.PerformerLM(**_model_sizes(case), causal=True, nb_features=256, **local)
        return library.AutoregressiveWrapper(model)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class LocalTransformerPeer(ModelPeer):
    """A transformer with local attention."""

    mechanism, package, library = "local", "local-attention", "local_attention"

    def build(self, case: Case, library: Any) -> nn.Module:
        return library.LocalTransformer(**_model_sizes(case), local_attn_window_size=256)


class FlashLinearAttentionModelPeer(ModelPeer):
    """A linear transformer with a recurrent cache."""

    mechanism, package, library = "linear", "flash-linear-attention", "fla.models"
    replaced, tokens = False, 16
    not_on_cpu = FlashLinearAttentionPeer.not_on_cpu

    def build(self, case: Case, library: Any) -> nn.Module:
        config = library.LinearAttentionConfig(
            hidden_size=case.dim,
            num_hidden_layers=case.depth,
            num_heads=case.num_heads,
            vocab_size=VOCABULARY,
            norm_q=False,
            use_cache=True,
        )
        return library.LinearAttentionForCausalLM(config)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, labels=tokens).loss

    def generate(self, prompt: Tensor, tokens: int) -> Tensor:
        return generate_greedily(self.net, prompt, tokens)


class TransformerPeer(ModelPeer):
    """PyTorch's own pre-norm transformer with full causal attention and no key-value cache."""

    mechanism, package, library = "softmax", "torch", "torch.nn"
    replaced = False

    def build(self, case: Case, library: Any) -> nn.Module:
        layer = library.TransformerEncoderLayer(
            case.dim, case.num_heads, 4 * case.dim, dropout=0.0, batch_first=True, norm_first=True
        )
        stack = library.TransformerEncoder(layer, case.depth, enable_nested_tensor=False)
        embedding, head = library.Embedding(VOCABULARY, case.dim), library.Linear(case.dim, VOCABULARY)
        return library.ModuleDict({"embedding": embedding, "stack": stack, "head": head})

    def logits(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.net, nn.ModuleDict)
        x = self.net["embedding"](tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.net["head"](self.net["stack"](x, mask=mask, is_causal=True))

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def generate(self, prompt: Tensor, tokens: int) -> Tensor:
        for _ in range(tokens):
            prompt = torch.cat([prompt, self.logits(prompt)[:, -1:].argmax(-1)], 1)
        return prompt[:, -tokens:]


MODEL_PEERS: dict[str, type[ModelPeer]] = {
    "linear-attention-transformer, half local": LinearAttentionTransformerModelPeer,
    "performer-pytorch, half local": PerformerModelPeer,
    "local-attention": LocalTransformerPeer,
    "flash-linear-attention": FlashLinearAttentionModelPeer,
    "PyTorch transformer": TransformerPeer,
}
