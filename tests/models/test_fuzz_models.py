"""Random configurations: every form of a model computes the same numbers, whatever it is built from."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lengths_to_mask
from torch import Tensor, nn

import longspan
from longspan import Packing, Sampling, generate
from longspan.generation.generate import stream
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import ACTIVATIONS
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel

pytestmark = pytest.mark.slow

MODELS = 40  # per seed
COMPILED = 7  # One of this many models is compiled.
V, LONGEST = 11, 67
GREEDY = Sampling(temperature=0)
OWN = ["local", "decay", "delta"]  # without cross-attention
Pick = random.Random


def maybe(pick: Pick, chance: float = 0.3, **options: Any) -> dict[str, Any]:
    """Each option, a list of values or a function, with some chance."""
    found = {}
    for name, values in options.items():
        if pick.random() < chance:
            found[name] = values() if callable(values) else pick.choice(values)
    return found


def one_mechanism(pick: Pick, cross: bool) -> dict[str, Any]:
    name = pick.choice(["softmax", "linear", "performer", "linformer"] + ([] if cross else OWN * 2))
    options: dict[str, Any] = {}
    if name == "softmax":
        options = maybe(pick, scale=[0.3], dropout=[0.2])
    elif name == "local":
        options = maybe(pick, look_back=[0, 1, 2], look_ahead=[1], shared_qk=[True], xpos=[3.0], scale=[0.4])
        blocks = "look_back" in options or "look_ahead" in options
        options |= {"window": pick.choice([1, 2, 5, 13]) if blocks else pick.choice([1, 4, 7, 90, (2, 3), (4, 0)])}
        options |= maybe(pick, dropout=[0.2])
    elif name == "decay":
        options = {"gate": pick.choice(["fixed", "head", "channel"])}
    elif name == "delta":
        options = {"gate": pick.choice(["none", "head", "channel"]), **maybe(pick, negative_eigenvalues=[True])}
    elif name == "linear":
        kind = pick.choice(["elu", "relu", "softmax", "identity"])
        options = {"feature_map": kind, **maybe(pick, output_scale=[0.5], first_bucket=["zero"])}
        options |= {"normalize": "none"} if kind == "identity" else maybe(pick, normalize=["query", "feature"])
        if not cross:
            options |= maybe(pick, **{pick.choice(["blind_spot", "phantom"]): [3]})
    elif name == "performer":
        options = maybe(pick, kernel=["relu", "softplus", "sigmoid"], row_norms=["unit"], epsilon=[1e-3])
        options |= maybe(pick, normalize=["query", "feature"], redraw_interval=[None, 2])
        options |= pick.choice([{}, {"num_features": pick.choice([3, 11])}, {"projection": False}])
    else:
        options = {"rank": pick.choice([1, 3, 6]), "max_length": pick.choice([LONGEST, 5])}
        options |= maybe(pick, projection=["random", "convolution"], share_projection=[True], per_head=[True])
        options |= maybe(pick, bias=[True], dropout=[0.2])
        if options.get("projection") == "convolution":
            options |= {"max_length": LONGEST, **maybe(pick, whole_stretches=[True])}
        else:
            options |= {"periodic": True} if options["max_length"] < LONGEST else maybe(pick, periodic=[True])
    return {"mechanism": name, **options}


def mechanism(pick: Pick, heads: int, cross: bool) -> Any:
    if heads > 1 and pick.random() < 0.25:
        first = pick.randrange(1, heads)
        parts = [{**one_mechanism(pick, cross), "num_heads": size} for size in (first, heads - first)]
        return {"mechanism": "split", "parts": parts}
    if pick.random() < 0.2:
        return [one_mechanism(pick, cross) for _ in range(2)]
    return one_mechanism(pick, cross)


def attention(pick: Pick, cross: bool = False) -> AttentionConfig:
    heads = pick.choice([1, 2, 3, 4])
    options: dict[str, Any] = {"num_heads": heads, "head_dim": pick.choice([2, 4, 4, 6, 5])}
    options |= maybe(pick, num_kv_heads=[n for n in (1, 2) if heads % n == 0], shared_kv=[True], qkv_bias=[True])
    options |= maybe(pick, out_bias=[False], qk_norm=[True], value_gates=[True], dropout=[0.2])
    options |= maybe(pick, out_norm=[True], out_gate=["sigmoid", "silu"])
    if not cross:
        options |= maybe(pick, 0.4, rotary=["halves", "interleaved", {"local": "halves"}], rotary_base=[100.0])
        options |= maybe(pick, 0.2, rotary_dim=[2, 4])
        options |= maybe(pick, 0.15, conv_size=[2, 4])
        if not options.keys() & {"num_kv_heads", "shared_kv"}:
            options |= maybe(pick, 0.15, num_qk_heads=[n for n in (1, 2) if heads % n == 0])
    spec = mechanism(pick, heads, cross)
    specs = [spec] if isinstance(spec, dict) else spec
    if all(one["mechanism"] == "linformer" for one in specs):
        options |= maybe(pick, share_projection=[True])
    if any(one["mechanism"] == "local" for one in specs):
        options |= maybe(pick, dynamic_bias=[5])
    return AttentionConfig(mechanism=spec, **options)


def feed_forward(pick: Pick) -> FeedForwardConfig:
    options = maybe(pick, activation=list(ACTIVATIONS), gated=[True], bias=[False], dropout=[0.2], chunks=[2, 3])
    return FeedForwardConfig(**options, **pick.choice([{"mult": 2}, {"hidden": 7}]))


def config(pick: Pick, *, causal: bool, dim: int, **given: Any) -> ModelConfig:
    """A configuration that may contradict itself: then a ValueError says so."""
    depth = pick.choice([1, 2, 3])
    residual = pick.choice(["single", "single", "parallel", "double", "hyper"])
    legacy = maybe(pick, 0.1, axial_stride=[1, 2, 3], out_dim=[7], out_dropout=[0.2], position_base=[100.0])
    legacy |= maybe(pick, 0.1, product_keys=[(0,), (depth - 1,)], logits_bias=[False])
    if depth > 1 and residual == "single":
        legacy |= maybe(pick, 0.1, inner_dim=[10])
    if "inner_dim" in legacy:
        legacy |= maybe(pick, 0.5, resample=[True])
    if "axial_stride" in legacy:
        legacy |= maybe(pick, 0.4, axial=lambda: attention(pick))
    if "axial_stride" in legacy or "cross" in given:
        legacy |= maybe(pick, 0.3, side_feed_forward=lambda: feed_forward(pick))
    if residual == "double":
        legacy |= maybe(pick, 0.3, sum_streams=[True])
    executions = ["keep", "recompute", "recompute_heads"] + (["reverse"] * 2 if residual == "double" else [])
    shifts = [(0, 1), (2, 0, 1), (1,)] if causal else [(0, 1), (0, -1, 1), (-2,)]
    options = maybe(pick, token_shift=shifts, num_streams=[1, 3], embed_dim=[6], tie_embeddings=[True])
    options |= maybe(pick, embed_dropout=[0.2], final_norm=[False, "scale"], norm=["rms", "scale"])
    options |= maybe(pick, norm_position=["rezero", "post"] if residual == "single" else ["rezero"])
    options |= maybe(pick, 0.5, execution=executions)
    if "embed_dim" in options:
        legacy |= maybe(pick, 0.3, narrow_norm=[True])
    positions = pick.choice(["none", "none", "learned", "sinusoidal", "axial"])
    options |= {"positions": positions, "max_length": LONGEST if positions == "learned" else None}
    options |= {"axial_shape": (LONGEST, 2) if positions == "axial" else None}
    return ModelConfig(
        dim=dim,
        depth=depth,
        causal=causal,
        vocab_size=V,
        residual=residual,
        attention=attention(pick),
        feed_forward=None if pick.random() < 0.15 else feed_forward(pick),
        legacy=LegacyConfig(**legacy, num_keys=3),
        **{**options, **given},
    )


def build(pick: Pick) -> nn.Module:
    dim, kind = (
        pick.choice([6, 8, 12]),
        pick.choice(["causal"] * 4 + ["bidirectional"] * 2 + ["pair"] * 2 + ["classes"]),
    )
    if kind == "causal":
        return LanguageModel(config(pick, causal=True, dim=dim))
    if kind == "bidirectional":
        return LanguageModel(config(pick, causal=False, dim=dim))
    if kind == "classes":
        return Classifier(config(pick, causal=pick.random() < 0.5, dim=dim, num_classes=3))
    encoder = config(pick, causal=False, dim=dim)
    return EncoderDecoder(encoder, config(pick, causal=True, dim=dim, cross=attention(pick, cross=True)))


def shaken(model: nn.Module) -> nn.Module:
    """Every parameter moved from its initial value: those that begin at 0 or 1 would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert got.shape == expected.shape, f"{tuple(got.shape)} and not {tuple(expected.shape)}"
    assert expected.isfinite().all(), "not finite"
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, atol=tolerance * scale, rtol=0)


class Checks:
    """The checks of one model, each a method whose name begins with `check_`."""

    def __init__(self, model: Any, pick: Pick, folder: Path, number: int) -> None:
        self.model, self.pick, self.folder, self.number = model, pick, folder, number
        self.exact = copy.deepcopy(model).double().eval()
        self.pair = isinstance(model, EncoderDecoder)
        self.body = self.exact.decoder if self.pair else getattr(self.exact, "body", self.exact)
        source = self.tokens(2, pick.choice([1, 5, 13]))
        self.source = source.masked_fill(torch.rand(source.shape) < pick.choice([0, 0.3]), 0)  # padding anywhere
        self.context = {}
        if self.pair:
            context, mask = self.exact.encode(self.source)
            self.context = {"context": context.detach(), "context_mask": mask}

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(1, V, shape)

    def length(self) -> int:
        return self.pick.choice([1, 2, 7, 11, 13, 23, LONGEST - 2])

    def logits(self, x: Tensor, **options: Any) -> Tensor:
        if isinstance(self.exact, Classifier):
            return self.exact(x, **options)
        return self.body(x, **options)

    def loss(self, model: Any, x: Tensor) -> Tensor:
        if self.pair:
            return model(self.source, x)
        if isinstance(model, Classifier):
            return model(x).square().sum()
        return model.loss(x) if model.config.causal else model.loss(x, x)

    @property
    def generates(self) -> bool:
        return self.body.config.causal and not isinstance(self.exact, Classifier)

    def check_extend_in_pieces_is_forward(self) -> None:
        if not self.generates:
            return
        x, outs, start = self.tokens(2, self.length()), [], 0
        with torch.set_grad_enabled(self.pick.random() < 0.5):
            room = self.pick.choice([None, x.shape[1], LONGEST])
            state = self.body.new_state(2, max_length=room, **self.context)
            while start < x.shape[1]:
                size = self.pick.choice([1, 1, 2, 5, 17])
                out, state = self.body.extend(x[:, start : start + size], state)
                outs.append(out)
                start += size
        close(torch.cat(outs, 1), self.logits(x, **self.context))
        assert state.length.tolist() == [x.shape[1]] * 2

    def check_padded_is_shorter(self) -> None:
        length = self.length()
        lengths = [length, self.pick.randrange(1, length + 1)]
        side = self.pick.choice(["left", "right"]) if self.body.config.causal else "right"
        mask = lengths_to_mask(lengths, length, side)
        x = self.tokens(2, length)
        out = self.logits(x, key_mask=mask, **self.context)
        for row, real in enumerate(mask):
            context = {name: value[row : row + 1] for name, value in self.context.items()}
            expected = self.logits(x[row : row + 1, real], **context)
            close(out[row : row + 1] if out.ndim == 2 else out[row : row + 1, real], expected)

    def check_packed_is_separate(self) -> None:
        if isinstance(self.exact, Classifier):
            return
        lengths = [self.length() % 13 + 1 for _ in range(3)]
        x, options = self.tokens(1, sum(lengths)), {}
        pieces = [{} for _ in lengths]
        if self.pair:
            sizes = [3, 1, 6]
            context = torch.randn(1, sum(sizes), self.body.config.dim, dtype=torch.float64)
            options = {"context": context, "context_packing": Packing.from_lengths(sizes)}
            pieces = [{"context": piece} for piece in context.split(sizes, 1)]
        out = self.logits(x, packing=Packing.from_lengths(lengths), **options)
        each = zip(x.split(lengths, 1), pieces, strict=True)
        close(out, torch.cat([self.logits(piece, **one) for piece, one in each], 1))

    def check_generated_tokens_are_the_likeliest(self) -> None:
        if not self.generates:
            return
        prompts = [self.tokens(self.pick.choice([1, 3, 8])).tolist() for _ in range(2)]
        source = {"source": self.source} if self.pair else {}
        steps = stream(self.exact, prompts, 4, sampling=GREEDY, **source)
        first = [list(row) for row in zip(*(tokens for tokens, _ in steps), strict=True)]
        rest = generate(self.exact, steps.session, 3, sampling=GREEDY).tokens
        for row, (prompt, tokens) in enumerate(zip(prompts, first, strict=True)):
            sequence = torch.tensor([[*prompt, *tokens, *rest[row]]])
            context = {name: value[row : row + 1] for name, value in self.context.items()}
            logits = self.logits(sequence[:, :-1], **context)[0, len(prompt) - 1 :]
            chosen = logits.gather(1, sequence[0, len(prompt) :, None])[:, 0]
            close(chosen, logits.amax(1))

    def check_saved_is_loaded(self) -> None:
        longspan.save(self.model, self.folder)
        loaded = longspan.load(self.folder)
        names, expected = loaded.state_dict(), self.model.state_dict()
        assert list(names) == list(expected)
        assert all(torch.equal(names[name], x) for name, x in expected.items())
        x = self.tokens(2, 7)
        assert torch.equal(self.loss(loaded.eval(), x), self.loss(copy.deepcopy(self.model).eval(), x))

    def check_gradients_are_finite(self) -> None:
        model = copy.deepcopy(self.model).train()
        loss = self.loss(model, self.tokens(2, self.length()))
        loss.backward()
        assert loss.isfinite(), f"loss {loss}"
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), f"gradient of {name}"

    def check_every_execution_is_the_same(self) -> None:
        x, found = self.tokens(2, self.length()), []
        for name in (self.body.config.execution, "keep"):
            model = copy.deepcopy(self.exact)
            (model.decoder if self.pair else getattr(model, "body", model)).transformer.stack.execution = name
            self.loss(model, x).backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        for got, expected in zip(*found, strict=True):
            close(got, expected, 1e-8)

    def check_compiled_is_eager(self) -> None:
        if self.number % COMPILED:
            return
        torch._dynamo.reset()
        x = self.tokens(2, 7)
        run = torch.compile(self.loss, fullgraph=True, dynamic=self.pick.choice([None, True]), backend="eager")
        got, expected = run(self.exact, x), self.loss(self.exact, x)
        close(got, expected)
        parameters = [p for p in self.exact.parameters() if p.requires_grad]
        grads = (torch.autograd.grad(out, parameters, allow_unused=True) for out in (got, expected))
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b, 1e-8)

    def check_autocast_runs(self) -> None:
        x = self.tokens(2, self.pick.choice([1, 7, 23]))
        with torch.autocast("cpu", torch.bfloat16):
            model = copy.deepcopy(self.model).train()
            loss = self.loss(model, x)
            loss.backward()
            assert loss.isfinite()
            model.eval()
            if not self.generates:
                return
            source = {"source": self.source} if self.pair else {}
            assert len(generate(model, x[:, :3], 3, **source).tokens[0]) == 3
            decoder, context = (model.decoder, {}) if self.pair else (model, {})
            if self.pair:
                vectors, mask = model.encode(self.source)
                context = {"context": vectors, "context_mask": mask}
            state, outs = decoder.new_state(2, **context), []
            for piece in x.split([1, x.shape[1] - 1], 1):
                out, state = decoder.extend(piece, state)
                outs.append(out)
            assert torch.cat(outs, 1).isfinite().all()


CHECKS: dict[str, Callable[[Checks], None]] = {
    name: function for name, function in vars(Checks).items() if name.startswith("check_")
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore")  # The compiler's own.
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_models(seed: int, tmp_path: Path) -> None:
    failures: list[str] = []
    refused: Counter[str] = Counter()
    number = attempt = 0
    while number < MODELS:
        attempt += 1
        pick = random.Random(f"{seed} {attempt}")
        torch.manual_seed(attempt)
        try:
            model = shaken(build(pick))
        except ValueError as error:
            refused[str(error)] += 1
            assert sum(refused.values()) < 20 * MODELS, refused.most_common(9)
            continue
        number += 1
        checks = Checks(model, pick, tmp_path / str(number), number)
        for name, check in CHECKS.items():
            try:
                check(checks)
            except Exception as error:  # any error is one, and the others are to be seen too
                described = vars(model).get("config") or (model.encoder.config, model.decoder.config)
                message = f"{type(error).__name__}: {error}"[:600]
                failures.append(f"seed {seed}, attempt {attempt}, {name}: {message}\n  {described}")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures)
