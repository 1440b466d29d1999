"""Cases whose results must not change: mechanisms, models and the compatibility packages, by name.

Each case is a function without arguments that returns a :class:`Result`. Weights and inputs come from generators of
their own, so neither the order in which modules are initialized nor the global random state can move a number.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import longspan
from longspan import Packing, build_mechanism

FIXTURES = Path(__file__).parent / "fixtures"

# How options of mechanisms are spelled: cases use the keys, the library is given the values.
OPTIONS = {"normalize": "normalize"}

B, T, S, D, E, V, DIM = 2, 17, 17, 4, 6, 13, 16
PACKED = (5, 1, 9, 2)
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass
class Result:
    """Tensors by name, and plain values (keys, shapes, tokens) that must be equal as they are."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.tensors[f"{prefix}.{name}"] = tensor.detach().clone()


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def draw(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(name), dtype=torch.float64).to(dtype)


def draw_tokens(name: str, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, V, shape, generator=seeded(name))


def values(name: str, index: int, like: Tensor) -> Tensor:
    """The values of the ``index``-th entry, in sorted order, of a state dict."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    last = name.rsplit(".", 1)[-1]
    if "projection" in last:
        return drawn.to(like.dtype)
    if like.ndim == 1 and last in ("weight", "scale", "gamma", "g"):
        return (1 + 0.2 * drawn).to(like.dtype)
    return (0.2 * drawn).to(like.dtype)


@torch.no_grad()
def fill(module: Any) -> Any:
    """Overwrites every floating entry of the state dict in place; tied entries once."""
    seen: set[int] = set()
    for index, (name, tensor) in enumerate(sorted(module.state_dict(keep_vars=True).items())):
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensor.copy_(values(name, index, tensor))
    return module


@torch.no_grad()
def fill_by_loading(module: Any) -> Any:
    """As :func:`fill` for modules whose state dict is a translation: its entries are loaded, not overwritten."""
    held = module.state_dict()
    given: dict[str, Tensor] = {}
    for index, (name, tensor) in enumerate(sorted(held.items())):
        twins = (
            other
            for other in given
            if held[other].shape == tensor.shape
            and tensor.numel() > 1
            and torch.equal(held[other], tensor)
            and bool((tensor != tensor.flatten()[0]).any())
        )
        twin = next(twins, None)
        floating = tensor.is_floating_point() and not name.endswith("inv_freq")
        given[name] = given[twin] if twin else values(name, index, tensor) if floating else tensor
    module.load_state_dict(given)
    return module


def described(module: nn.Module) -> dict[str, list[Any]]:
    """Names, shapes and dtypes of a state dict, in its order."""
    return {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in module.state_dict().items()}


def gradients(out: Tensor, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a fixed combination of ``out``; zeros where there is no path."""
    loss = out if out.ndim == 0 else (out * draw("weight", *out.shape, dtype=out.dtype)).sum()
    found = torch.autograd.grad(loss, list(of.values()), allow_unused=True)
    return {
        f"grad.{name}": torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(of.items(), found, strict=True)
    }


# Mechanisms -----------------------------------------------------------------------------------------------------------


class DistanceBias(nn.Module):
    """A learned function of the distance for each head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(num_heads))

    def forward(self, distance: Tensor) -> Tensor:
        distance = distance.to(self.slope.dtype)
        return self.slope[:, None] * distance + (0.1 * distance).sin()


GROUPED = {"num_heads": 4, "num_kv_heads": 2}
SINGLE = {"num_heads": 4, "num_kv_heads": 1}


def _mechanisms() -> dict[str, tuple[str, dict[str, Any]]]:
    found: dict[str, tuple[str, dict[str, Any]]] = {}

    def add(mechanism: str, variant: str, **options: Any) -> None:
        found[f"{mechanism}-{variant}"] = mechanism, options

    add("softmax", "plain")
    add("softmax", "scale-grouped", scale=0.3, **GROUPED)
    add("softmax", "single-square", value_dim=D, **SINGLE)

    add("local", "exact", window=5)
    add("local", "exact-one", window=1)
    add("local", "exact-wide", window=40)
    add("local", "exact-sides", window=(3, 2))
    add("local", "exact-ahead-grouped", window=(0, 4), **GROUPED)
    add("local", "exact-shared", window=5, shared_qk=True, scale=1.0)
    add("local", "exact-bias", window=5, bias=DistanceBias(2))
    add("local", "exact-xpos", window=5, xpos=3.0)
    add("local", "exact-offset", window=5, xpos=3.0, query_offset=2)
    add("local", "blocks", window=4, look_back=1)
    add("local", "blocks-ahead", window=4, look_ahead=1)
    add("local", "blocks-both-grouped", window=3, look_back=2, look_ahead=1, **GROUPED)
    add("local", "blocks-shared-grouped", window=4, look_back=1, shared_qk=True, **GROUPED)
    add("local", "blocks-bias-grouped", window=4, look_back=1, look_ahead=1, bias=DistanceBias(4), **GROUPED)
    add("local", "blocks-table", window=4, look_back=1, look_ahead=1, bias=nn.Parameter(torch.zeros(2, 4, 12)))
    add("local", "blocks-xpos", window=4, look_back=1, look_ahead=1, xpos=2.0, shared_qk=True)

    for feature_map in ("elu", "relu", "identity", "softmax"):
        for normalize in ("query", "feature", "none"):
            if (feature_map, normalize) in (("softmax", "none"), ("identity", "query"), ("identity", "feature")):
                continue  # Not defined, or divided by sums of any sign.
            add("linear", f"{feature_map}-{normalize}", feature_map=feature_map, normalize=normalize)
    add("linear", "elu-grouped", feature_map="elu", **GROUPED)
    add("linear", "softmax-feature-grouped", feature_map="softmax", normalize="feature", output_scale=0.4, **GROUPED)
    add("linear", "identity-none-grouped", feature_map="identity", normalize="none", output_scale=0.4, **GROUPED)
    add("linear", "elu-phantom", phantom=0.5)
    add("linear", "relu-phantom-grouped", feature_map="relu", phantom=0.1, **GROUPED)
    add("linear", "blind-elu-grouped", blind_spot=4, **GROUPED)
    add("linear", "blind-elu-zero", blind_spot=4, first_bucket="zero")
    add("linear", "blind-softmax", blind_spot=3, feature_map="softmax")
    zero = {"first_bucket": "zero", "normalize": "feature"}
    add("linear", "blind-softmax-feature", blind_spot=3, feature_map="softmax", **zero)
    add("linear", "blind-elu-none", blind_spot=2, feature_map="elu", normalize="none", first_bucket="zero")

    add("performer", "plain", num_features=5)
    add("performer", "unit-grouped", num_features=11, row_norms="unit", **GROUPED)
    add("performer", "epsilon", num_features=11, epsilon=1e-2)
    add("performer", "epsilon-grouped", num_features=5, epsilon=1e-4, **GROUPED)
    add("performer", "epsilon-phantom", num_features=7, epsilon=1e-3, phantom=1e-6)
    add("performer", "feature", num_features=5, normalize="feature")
    add("performer", "generalized-relu", num_features=5, kernel="relu")
    add("performer", "generalized-relu-phantom", num_features=5, kernel="relu", phantom=0.01)
    unit = {"epsilon": 0.5, "row_norms": "unit", **GROUPED}
    add("performer", "generalized-gelu-grouped", num_features=5, kernel="gelu", **unit)
    add("performer", "generalized-plain", kernel="softplus", projection=False)
    add("performer", "generalized-exp", kernel="exp", num_features=5)
    add("performer", "without-projection", projection=False)

    table = {"rank": 4, "max_length": 40}
    add("linformer", "learned", **table)
    add("linformer", "random", projection="random", **table)
    add("linformer", "bias", bias=True, **table)
    add("linformer", "per-head", per_head=True, **table)
    add("linformer", "per-head-bias-grouped", per_head=True, bias=True, **table, **GROUPED)
    add("linformer", "shared-grouped", share_projection=True, bias=True, **table, **GROUPED)
    add("linformer", "periodic", rank=4, max_length=6, periodic=True)
    add("linformer", "periodic-grouped", rank=4, max_length=5, periodic=True, bias=True, per_head=True, **GROUPED)
    add("linformer", "convolution", projection="convolution", **table)
    add("linformer", "convolution-grouped", rank=9, max_length=40, projection="convolution", bias=True, **GROUPED)
    shared = {"share_projection": True, "value_dim": D}
    add("linformer", "convolution-shared", rank=9, max_length=40, projection="convolution", **shared)
    add("linformer", "convolution-per-head", projection="convolution", per_head=True, bias=True, **table)
    add("linformer", "convolution-whole", rank=13, max_length=40, projection="convolution", whole_stretches=True)

    def part(mechanism: str, num_heads: int, **options: Any) -> dict[str, Any]:
        return {"mechanism": mechanism, "num_heads": num_heads, **options}

    add("split", "local-performer", parts=[part("local", 1, window=5), part("performer", 1, num_features=5)])
    three = [part("linear", 2, feature_map="softmax"), part("softmax", 2), part("linformer", 2, bias=True, **table)]
    add("split", "three-grouped", num_heads=6, num_kv_heads=3, parts=three)
    single = [part("local", 1, window=4, look_back=1), part("linear", 2, blind_spot=4)]
    single += [part("linformer", 1, rank=4, max_length=5, periodic=True)]
    add("split", "three-single", parts=single, **SINGLE)
    nested = [part("softmax", 1), part("linear", 2, normalize="feature")]
    nested = [part("performer", 1, num_features=5, epsilon=1e-3), part("split", 3, parts=nested)]
    add("split", "nested", num_heads=4, parts=nested)
    return found


MECHANISMS = _mechanisms()


def spelled(options: Any) -> Any:
    """Options as the library spells them, those of parts included."""
    if isinstance(options, Mapping):
        return {OPTIONS.get(name, name): spelled(value) for name, value in options.items()}
    return [spelled(part) for part in options] if isinstance(options, list) else options


def build(case: str, dtype: torch.dtype) -> Any:
    name, options = MECHANISMS[case]
    # Fresh modules and parameters each time. Zeroed parameters of local tables are leaves that deepcopy accepts.
    options = {"num_heads": 2, "value_dim": E, **copy.deepcopy(options)}
    num_heads = options.pop("num_heads")
    return fill(build_mechanism(name, num_heads, D, **spelled(options)).eval().to(dtype))


def inputs(mechanism: Any, batch: int, queries: int, keys: int, dtype: torch.dtype) -> dict[str, Tensor]:
    m = mechanism
    shapes = {
        "q": (batch, queries, m.num_heads, m.head_dim),
        "k": (batch, keys, m.num_kv_heads, m.head_dim),
        "v": (batch, keys, m.num_kv_heads, m.value_dim),
    }
    return {name: draw(name, *shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def left_padded(length: int = T) -> Tensor:
    return torch.arange(length) >= torch.tensor([[0], [6]])


def with_holes(length: int = T) -> Tensor:
    return draw_tokens("holes", B, length) > 3


def through_state(mechanism: Any, qkv: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Two pieces, the second left-padded, three single tokens, one that is only written, and a read."""
    q, k, v = (qkv[name] for name in "qkv")
    state = mechanism.new_state(B, dtype=q.dtype)
    outs = []
    out, state = mechanism.extend(state, q[:, :7], k[:, :7], v[:, :7])
    outs.append(out)
    mask = left_padded(6) | (torch.arange(6) >= 2)
    out, state = mechanism.extend(state, q[:, 7:13], k[:, 7:13], v[:, 7:13], key_mask=mask)
    outs.append(out)
    for t in range(13, 16):
        one = slice(t, t + 1)
        out, state = mechanism.step(state, q[:, one], k[:, one], v[:, one])
        outs.append(out)
    state = mechanism.write(state, k[:, 16:], v[:, 16:])
    outs.append(mechanism.read(state, q[:, 15:]))
    return torch.cat(outs, 1), {f"state.{name}": x for name, x in state.tensors().items()}


def run_mechanism(case: str, dtype: torch.dtype) -> Result:
    mechanism, result = build(case, dtype), Result()
    if dtype == torch.float64:
        result.facts["state_dict"] = described(mechanism)
    parameters = dict(mechanism.named_parameters())

    def record(mode: str, out: Tensor, qkv: Mapping[str, Tensor]) -> None:
        result.add(mode, {"out": out, **gradients(out, {**qkv, **parameters})})

    qkv = inputs(mechanism, B, T, T, dtype)
    record("causal", mechanism(**qkv, causal=True), qkv)
    out, state = through_state(mechanism, qkv)
    result.add("state", state)
    record("state", out, qkv)
    with torch.no_grad():
        out, state = through_state(mechanism, qkv)
        result.add("no_grad", {"out": out, **state})
    record("bidirectional", mechanism(**qkv), qkv)
    if dtype == torch.float32:
        return result
    record("padded", mechanism(**qkv, causal=True, key_mask=left_padded()), qkv)
    record("masked", mechanism(**qkv, key_mask=with_holes()), qkv)
    one = inputs(mechanism, 1, T, T, dtype)
    packing = Packing.from_lengths(PACKED)
    record("packed", mechanism(**one, causal=True, packing=packing), one)
    record("packed_bidirectional", mechanism(**one, packing=packing), one)
    if mechanism.supports_cross:
        across = inputs(mechanism, B, 5, S, dtype)
        record("cross", mechanism(**across), across)
    if case in LONG:
        far = inputs(mechanism, 1, 300, 300, dtype)
        record("long", mechanism(**far, causal=True), far)
    return result


# Long enough for several chunks; linformer's tables reach 40 tokens unless periodic.
LONG = {
    *("softmax-plain", "local-exact", "local-blocks", "local-exact-wide", "linear-elu-query", "linear-softmax-query"),
    *("linear-softmax-feature", "linear-elu-none", "linear-elu-phantom", "linear-blind-softmax", "performer-plain"),
    *("performer-epsilon", "performer-generalized-relu", "linformer-periodic", "split-local-performer"),
}


# Models ---------------------------------------------------------------------------------------------------------------


def configs() -> dict[str, dict[str, Any]]:
    """Configurations by name, in the spelling of the day they were written."""
    return json.loads((FIXTURES / "configs.json").read_text())


def config(values: Mapping[str, Any]) -> Any:
    return longspan.ModelConfig.from_dict(values)


def named_gradients(module: nn.Module, out: Tensor) -> dict[str, Tensor]:
    return gradients(out, dict(module.named_parameters()))


def said(model: nn.Module, **how: Any) -> dict[str, list[list[int]]]:
    """Greedy and sampled continuations of prompts of different lengths."""
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    sampling = longspan.Sampling(temperature=0.9, top_k=9, top_p=0.95, repetition_penalty=1.1)
    greedy = longspan.generate(model, prompts, 12, sampling=longspan.Sampling(temperature=0), **how)
    sampled = longspan.generate(model, prompts, 12, sampling=sampling, seed=3, **how)
    return {"greedy": greedy.tokens, "sampled": sampled.tokens}


def run_language_model(values: Mapping[str, Any], dtype: torch.dtype) -> Result:
    model = fill(longspan.LanguageModel(config(values)).to(dtype)).eval()
    result = Result(facts={"state_dict": described(model)})
    x = draw_tokens("tokens", B, T)
    causal = values.get("causal", False)
    how: dict[str, Any] = {}
    if "cross" in values:
        how = {"context": draw("context", B, 5, values["dim"], dtype=dtype)}
        how["context_mask"] = left_padded(8)[:, 3:]
    logits = model(x, **how)
    result.add("plain", {"logits": logits, **named_gradients(model, logits)})
    if dtype == torch.float32:
        del result.facts["state_dict"]  # as in float64
        return result
    mask = left_padded() if causal else with_holes()
    loss = model.loss(x, key_mask=mask, **how)
    result.add("loss", {"out": loss, **named_gradients(model, loss)})
    result.add("masked", {"logits": model(x, key_mask=mask, **how)})
    model.train()  # Layers are kept, recomputed or reversed in training only.
    loss = model.loss(x, **how)
    result.add("train", {"out": loss, **named_gradients(model, loss)})
    model.eval()
    if not how:
        result.add("packed", {"logits": model(draw_tokens("packed", 1, T), packing=Packing.from_lengths(PACKED))})
    if causal:
        with torch.no_grad():
            state = model.new_state(B, **how)
            first, state = model.extend(x[:, :9], state)
            second, state = model.extend(x[:, 9:], state, key_mask=left_padded(8)[:, :] | (torch.arange(8) >= 3))
            result.add("state", {"out": torch.cat([first, second], 1), **state.tensors()})
        if not how:
            result.facts |= said(model)
    return result


def run_transformer(values: Mapping[str, Any], dtype: torch.dtype) -> Result:
    model = fill(longspan.Transformer(config(values)).to(dtype)).train()
    result = Result(facts={"state_dict": described(model)})
    x = draw("x", B, T, values["dim"], dtype=dtype).requires_grad_()
    how = {"context": draw("context", B, 5, values["dim"], dtype=dtype)} if "cross" in values else {}
    for mode, mask in (("plain", None), ("masked", left_padded())):
        out = model(x, key_mask=mask, **how)
        found = gradients(out, {"x": x, **dict(model.named_parameters())})
        result.add(mode, {"out": out, **found})
    return result


def run_classifier(values: Mapping[str, Any], dtype: torch.dtype) -> Result:
    model = fill(longspan.Classifier(config(values)).to(dtype)).train()
    result = Result(facts={"state_dict": described(model)})
    x = draw_tokens("tokens", B, T) if "vocab_size" in values else draw("x", B, T, values["dim"], dtype=dtype)
    for mode, mask in (("plain", None), ("masked", with_holes())):
        out = model(x, key_mask=mask)
        result.add(mode, {"out": out, **named_gradients(model, out)})
    return result


def run_encoder_decoder(values: Mapping[str, Any], dtype: torch.dtype) -> Result:
    tie = values.get("tie_embeddings", False)
    model = longspan.EncoderDecoder(config(values["encoder"]), config(values["decoder"]), tie_embeddings=tie)
    model = fill(model.to(dtype)).train()
    result = Result(facts={"state_dict": described(model)})
    source, target = draw_tokens("source", B, 9, low=1), draw_tokens("target", B, T, low=1)
    source[0, 7:] = target[1, 11:] = 0
    loss = model(source, target)
    result.add("loss", {"out": loss, **named_gradients(model, loss)})
    model.eval()
    result.facts |= said(model, source=source)
    return result


def run_dropout(values: Mapping[str, Any], dtype: torch.dtype) -> Result:
    """Three steps in training mode: the order in which random numbers are drawn, and features redrawn."""
    torch.manual_seed(5)
    model = fill(longspan.LanguageModel(config(values)).to(dtype)).train()
    result, x = Result(), draw_tokens("tokens", B, T)
    torch.manual_seed(11)
    for step in range(3):
        loss = model.loss(x)
        result.add(f"step{step}", {"out": loss, **named_gradients(model, loss)})
    result.add("after", {name: x for name, x in model.state_dict().items() if name.endswith(("projection", "counts"))})
    return result


RUNNERS: dict[str, Callable[[Mapping[str, Any], torch.dtype], Result]] = {
    "language_model": run_language_model,
    "transformer": run_transformer,
    "classifier": run_classifier,
    "encoder_decoder": run_encoder_decoder,
    "dropout": run_dropout,
}


def run_image(options: Mapping[str, Any]) -> Result:
    options = dict(options)
    mechanism = options.pop("mechanism", None)
    if mechanism is not None:
        given = {"num_features": 5} if mechanism == "performer" else {}
        mechanism = build_mechanism(mechanism, 2, D, value_dim=E, **given)
    model = fill(longspan.ImageAttention(6, mechanism, **options).double())
    result = Result(facts={"state_dict": described(model)})
    x = draw("map", B, 6, 5, 7).requires_grad_()
    context = draw("context", B, 4, options.get("context_dim") or 6).requires_grad_()
    mask = torch.tensor([[True] * 4, [True, False, True, False]])
    for mode, how in (("plain", {}), ("context", {"context": context, "context_mask": mask})):
        out = model(x, **how)
        result.add(mode, {"out": out, **gradients(out, {"x": x, **dict(model.named_parameters())})})
    return result


IMAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"kernel_size": 3, "padding": 1, "stride": 2, "out_channels": 4},
    "performer-context": {"mechanism": "performer", "context_dim": 5},
    "softmax": {"mechanism": "softmax"},
}


# Compatibility packages -----------------------------------------------------------------------------------------------

LAT = {"num_tokens": V, "dim": DIM, "depth": 2, "max_seq_len": 32, "heads": 4, "dim_head": 4}
LAT |= {"local_attn_window_size": 8}
LAT_CAUSAL = {**LAT, "causal": True, "n_local_attn_heads": 2, "blindspot_size": 4}
PERFORMER = {"num_tokens": V, "max_seq_len": 32, "dim": DIM, "depth": 2, "heads": 4, "dim_head": 4, "nb_features": 7}
LINFORMER = {"num_tokens": V, "dim": DIM, "seq_len": T, "depth": 2, "k": 5, "heads": 4}
STILL = {"dropout": 0.0, "dropout_ff": 0.0, "dropout_tokens": 0.0}
LINFORMER_PYTORCH = {"num_tokens": V, "input_size": T, "channels": DIM, "dim_k": 5, "dim_ff": 24, "nhead": 4, **STILL}
LOCAL = {"num_tokens": V, "max_seq_len": 32, "dim": DIM, "depth": 2, "heads": 2, "dim_head": 6}
LOCAL |= {"local_attn_window_size": 5}
SIDES = {"num_tokens": V, "max_seq_len": 32, "depth": 1, "heads": 2, "dim_head": 4, "nb_features": 5}
SIDES_PYTORCH = {"num_tokens": V, "input_size": T, "channels": DIM, "dim_k": 5, "dim_ff": 24, "nhead": 2, "depth": 1}
SIDES_PYTORCH |= {"dropout": 0.0, "dropout_ff": 0.0}

# By name: package, class, arguments.
COMPAT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lat-lm": ("linear_attention_transformer", "LinearAttentionTransformerLM", LAT),
    "lat-causal": ("linear_attention_transformer", "LinearAttentionTransformerLM", LAT_CAUSAL),
    "lat-reversible": (
        "linear_attention_transformer",
        "LinearAttentionTransformerLM",
        LAT_CAUSAL | {"reversible": True},
    ),
    "lat-axial-glu": (
        "linear_attention_transformer",
        "LinearAttentionTransformerLM",
        LAT_CAUSAL | {"attend_axially": True, "ff_glu": True, "shift_tokens": True},
    ),
    "lat-emb-dim": ("linear_attention_transformer", "LinearAttentionTransformerLM", LAT | {"emb_dim": 8}),
    "lat-rotary": ("linear_attention_transformer", "LinearAttentionTransformerLM", LAT | {"use_rotary_emb": True}),
    "lat-pkm": (
        "linear_attention_transformer",
        "LinearAttentionTransformerLM",
        LAT_CAUSAL | {"pkm_layers": (1,), "pkm_num_keys": 4},
    ),
    "performer-lm": ("performer_pytorch", "PerformerLM", PERFORMER),
    "performer-causal": ("performer_pytorch", "PerformerLM", PERFORMER | {"causal": True}),
    "performer-local": (
        "performer_pytorch",
        "PerformerLM",
        PERFORMER | {"causal": True, "local_attn_heads": 2, "local_window_size": 8, "shift_tokens": True},
    ),
    "performer-generalized": (
        "performer_pytorch",
        "PerformerLM",
        PERFORMER | {"causal": True, "generalized_attention": True, "use_scalenorm": True, "ff_glu": True},
    ),
    "performer-reversible": (
        "performer_pytorch",
        "PerformerLM",
        PERFORMER | {"causal": True, "reversible": True, "use_rezero": True, "tie_embed": True},
    ),
    "performer-enc-dec": (
        "performer_pytorch",
        "PerformerEncDec",
        {"dim": DIM, **{f"{side}_{name}": value for side in ("enc", "dec") for name, value in SIDES.items()}},
    ),
    "linformer-lm": ("linformer", "LinformerLM", LINFORMER),
    "linformer-shared": ("linformer", "LinformerLM", LINFORMER | {"one_kv_head": True, "share_kv": True}),
    "linformer-reversible": ("linformer", "LinformerLM", LINFORMER | {"reversible": True}),
    "linformer-pytorch-lm": ("linformer_pytorch", "LinformerLM", LINFORMER_PYTORCH),
    "linformer-pytorch-causal": ("linformer_pytorch", "LinformerLM", LINFORMER_PYTORCH | {"causal": True}),
    "linformer-pytorch-options": (
        "linformer_pytorch",
        "LinformerLM",
        LINFORMER_PYTORCH | {"parameter_sharing": "none", "k_reduce_by_layer": 1, "method": "convolution"},
    ),
    "linformer-pytorch-full": (
        "linformer_pytorch",
        "LinformerLM",
        LINFORMER_PYTORCH | {"full_attention": True, "emb_dim": 8, "w_o_intermediate_dim": 6},
    ),
    "linformer-pytorch-inner": (
        "linformer_pytorch",
        "LinformerLM",
        LINFORMER_PYTORCH | {"parameter_sharing": "kv", "ff_intermediate": 12, "depth": 3},
    ),
    "linformer-pytorch-enc-dec": (
        "linformer_pytorch",
        "LinformerEncDec",
        {f"{side}_{name}": value for side in ("enc", "dec") for name, value in SIDES_PYTORCH.items()},
    ),
    "local-lm": ("local_attention", "LocalTransformer", LOCAL),
    "local-single": (
        "local_attention",
        "LocalTransformer",
        LOCAL | {"num_residual_streams": 1, "use_xpos": True, "qk_rmsnorm": True, "gate_values_per_head": True},
    ),
    "local-bias": ("local_attention", "LocalTransformer", LOCAL | {"use_dynamic_pos_bias": True}),
    "local-bidirectional": ("local_attention", "LocalTransformer", LOCAL | {"causal": False}),
}


def compat(case: str) -> Any:
    package, name, arguments = COMPAT[case]
    return fill_by_loading(getattr(import_module(f"longspan.compat.{package}"), name)(**arguments)).eval()


def translated_gradients(module: nn.Module, out: Tensor) -> dict[str, Tensor]:
    """Gradients under the names of the older package: those of the state dict."""
    parameters = list(module.parameters())
    loss = (out * draw("weight", *out.shape, dtype=out.dtype)).sum()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    twin = copy.deepcopy(module)
    for mine, parameter, grad in zip(twin.parameters(), parameters, found, strict=True):
        mine.data = torch.zeros_like(parameter) if grad is None else grad
    return {f"grad.{name}": x for name, x in twin.state_dict().items() if x.is_floating_point()}


def run_compat(case: str) -> Result:
    package, name, arguments = COMPAT[case]
    model = compat(case)
    result = Result(facts={"state_dict": described(model)})
    x = draw_tokens("tokens", B, T, low=1)
    if name.endswith("EncDec"):
        out = model(x, x.flip(1), **({"return_loss": False} if package == "performer_pytorch" else {}))
    else:
        out = model(x)
    result.add("plain", {"logits": out, **translated_gradients(model, out)})
    prompt = draw_tokens("prompt", B, 5, low=1)
    wrapped: Any = None
    if arguments.get("causal") and package in ("performer_pytorch", "linear_attention_transformer"):
        wrapped = import_module(f"longspan.compat.{package}").AutoregressiveWrapper(model)
    elif package == "local_attention" and arguments.get("causal", True):
        wrapped = model
    if wrapped is not None:
        # A thirteenth of the vocabulary is one token.
        for how, threshold in (("greedy", 0.9), ("sampled", 0.5)):
            torch.manual_seed(17)
            result.facts[how] = wrapped.generate(prompt, 12, filter_thres=threshold).tolist()
    elif name == "PerformerEncDec":
        torch.manual_seed(17)
        result.facts["greedy"] = model.generate(x, prompt[:, :1], 12, filter_thres=0.9).tolist()
    return result


# All of them ----------------------------------------------------------------------------------------------------------


def _cases() -> Iterator[tuple[str, Callable[[], Result]]]:
    for case in MECHANISMS:
        for name, dtype in DTYPES.items():
            yield f"mechanism/{case}/{name}", lambda case=case, dtype=dtype: run_mechanism(case, dtype)
    for case, values in configs().items():
        runner = RUNNERS[case.split("/")[0]]
        names = ("float64", "float32") if case.startswith("language_model/") else ("float64",)
        for name in names:
            yield f"{case}/{name}", lambda run=runner, values=values, name=name: run(values, DTYPES[name])
    for case, options in IMAGES.items():
        yield f"image/{case}", lambda options=options: run_image(options)
    for case in COMPAT:
        yield f"compat/{case}", lambda case=case: run_compat(case)


CASES: dict[str, Callable[[], Result]] = dict(_cases())


def run(case: str) -> Result:
    """One case on one thread, with the global random state put back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return CASES[case]()
    finally:
        torch.set_num_threads(threads)
