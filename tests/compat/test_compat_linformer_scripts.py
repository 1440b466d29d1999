"""How public projects use linformer and linformer-pytorch, in scripts of our own, on ours and on the originals."""

from __future__ import annotations

import io
from importlib import import_module

import older
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longspan.compat.import_hook import redirect_imports

LIBRARIES = ("linformer", "linformer_pytorch")


def both(build, library: str):
    """What `build` makes of the original and of ours, with the same weights."""
    made = []
    for package in (older.original(library), import_module(f"longspan.compat.{library}")):
        torch.manual_seed(0)
        made.append(build(package))
    made[1].load_state_dict(made[0].state_dict())
    return made


def assert_trains_alike(build, library: str, *inputs, steps: int = 3) -> None:
    """The losses of a few steps of Adam are the original's."""
    losses = []
    for model in both(build, library):
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for _ in range(steps):
            optimizer.zero_grad()
            out = model(*inputs)
            weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
            loss = (out * weight).mean() + out.square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class Patches(nn.Module):
    """A vision transformer around a given encoder: patches of 2 or 3 dimensions, and a class token."""

    def __init__(self, package, dims=2, pool="cls"):
        super().__init__()
        self.dims, self.pool = dims, pool
        count = 4**dims // 2**dims
        self.embed, self.head = nn.Linear(2**dims, 12), nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 3))
        self.position, self.token = nn.Parameter(torch.randn(1, count + 1, 12)), nn.Parameter(torch.randn(1, 1, 12))
        self.transformer = package.Linformer(dim=12, seq_len=count + 3, depth=2, heads=3, k=4)

    def forward(self, image):
        patches = image
        for axis in range(self.dims):
            patches = patches.unfold(axis + 1, 2, 2)
        x = self.embed(patches.reshape(len(image), -1, 2**self.dims))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x += self.position
        x = self.transformer(x)
        return self.head(x.mean(1) if self.pool == "mean" else x[:, 0])


@pytest.mark.parametrize(("dims", "pool"), [(2, "cls"), (3, "mean")])
def test_images_and_volumes(dims: int, pool: str) -> None:
    image = torch.randn(2, *[4] * dims)
    assert_trains_alike(lambda package: Patches(package, dims, pool), "linformer", image)


class OwnStack(nn.Module):
    """A stack of the library's parts: its norms, attention, feed-forward layers and containers."""

    def __init__(self, package, reversible=False, depth=2):
        super().__init__()
        parts = import_module(f"{package.__name__}.linformer")
        layers = nn.ModuleList()
        for _ in range(depth):
            attention = parts.LinformerSelfAttention(12, 11, k=4, heads=3, one_kv_head=True, dropout=0.0)
            layers.append(
                nn.ModuleList([parts.PreNorm(12, attention), parts.PreNorm(12, parts.FeedForward(12, glu=True))])
            )
        self.net = (parts.ReversibleSequence if reversible else parts.SequentialSequence)(layers)
        self.out = parts.Residual(nn.Linear(12, 12))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x):
        return self.out(self.net(x))


@pytest.mark.parametrize("reversible", [False, True])
def test_stacks_of_the_librarys_parts(reversible: bool) -> None:
    x = torch.randn(2, 11, 12, requires_grad=True)  # The original's reversible layers need it.
    assert_trains_alike(lambda package: OwnStack(package, reversible), "linformer", x)


class EncoderLayer(nn.Module):
    """Attention as one choice among others, with padding zeroed by the caller."""

    def __init__(self, package):
        super().__init__()
        self.attention = package.LinformerSelfAttention(dim=12, seq_len=17, k=min(256, 17), heads=3, share_kv=True)
        self.norm, self.feed_forward = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x, padding):
        x = x.masked_fill(padding[..., None], 0)
        x = self.norm(x + self.attention(x))
        return F.relu(self.feed_forward(x))


def test_attention_among_other_kinds() -> None:
    padding = torch.arange(13).expand(2, -1) >= torch.tensor([[9], [12]])
    assert_trains_alike(EncoderLayer, "linformer", torch.randn(2, 13, 12), padding)


def test_a_patched_forward_of_the_attention_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visualizations replace the method of the class, with the attributes of its layers."""
    x, stored, outs = torch.randn(2, 11, 12), [], []

    def forward(self, x, context=None, **kwargs):
        b, n, _ = x.shape
        q = self.to_q(x).reshape(b, n, self.heads, self.dim_head)
        k, v = (m(x).transpose(1, 2) @ p[:n] for m, p in ((self.to_k, self.proj_k), (self.to_v, self.proj_v)))
        k, v = (t.reshape(b, self.heads, self.dim_head, self.k) for t in (k, v))
        weights = self.dropout((torch.einsum("bnhd,bhdk->bhnk", q, k) * self.dim_head**-0.5).softmax(-1))
        stored.append(weights.detach())
        return self.to_out(torch.einsum("bhnk,bhdk->bnhd", weights, v).flatten(2))

    models = both(lambda package: package.Linformer(dim=12, seq_len=11, depth=2, heads=3, k=4), "linformer")
    plain = [model(x) for model in models]
    for model in models:
        monkeypatch.setattr(type(model.net.layers[0][0].fn), "forward", forward)
        outs.append(model(x))
    assert len(stored) == 4
    older.assert_close(stored[3], stored[1])
    for got, wanted in zip([*outs, plain[1]], [plain[0]] * 3, strict=True):
        older.assert_close(got, wanted)


class OwnHeads(nn.Module):
    """Attention of the library's heads: a class token as the only query, padding, and heads narrower than dim."""

    def __init__(self, package, dim=12, heads=3, length=11):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.heads = nn.ModuleList()
        for _ in range(heads):
            E = package.get_EF(length, 5)
            self.heads.append(package.LinearAttentionHead(dim=dim, dropout=0.0, E_proj=E, F_proj=E, causal_mask=None))

    def forward(self, query, source, padding):
        q, k, v = (
            m(x).chunk(len(self.heads), -1) for m, x in ((self.to_q, query), (self.to_k, source), (self.to_v, source))
        )
        outs = [
            head(a * 1, b * 1, c * 1, input_mask=~padding) for head, a, b, c in zip(self.heads, q, k, v, strict=True)
        ]
        return self.out(torch.cat(outs, -1))


@pytest.mark.parametrize("queries", [1, 11])
def test_own_attention_of_single_heads(queries: int) -> None:
    source, padding = torch.randn(2, 11, 12), torch.arange(11).expand(2, -1) >= torch.tensor([[7], [10]])
    assert_trains_alike(OwnHeads, "linformer_pytorch", source[:, :queries], source, padding)


SMALL = {
    "input_size": 11,
    "channels": 12,
    "dim_k": 5,
    "dim_ff": 10,
    "nhead": 3,
    "depth": 2,
    "dropout": 0.0,
    "dropout_ff": 0.0,
}


class Series(nn.Module):
    """A recurrent network before and after the transformer, which needs no positions then."""

    def __init__(self, package):
        super().__init__()
        self.first, self.last = nn.LSTM(3, 12, batch_first=True), nn.LSTM(12, 5, batch_first=True)
        # More compressed keys than tokens.
        self.transformer = package.Linformer(**SMALL | {"dim_k": 16}, parameter_sharing="layerwise")
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        x, _ = self.first(x)
        return self.last(self.norm(self.transformer(x.clone()) + x))[0]


def test_time_series() -> None:
    assert_trains_alike(Series, "linformer_pytorch", torch.randn(2, 11, 3))


class Neighbors(nn.Module):
    """Padded sets of the nodes of graphs, each through its own transformer of one layer."""

    def __init__(self, package):
        super().__init__()
        self.sides = nn.ModuleList(package.Padder(package.Linformer(**SMALL | {"depth": 1})) for _ in range(2))
        self.head = nn.Sequential(nn.LeakyReLU(), nn.Linear(12, 2))

    def forward(self, nodes):
        return torch.cat([self.head(side(nodes[None])[0]) for side in self.sides], -1)


def test_graphs_behind_a_padder() -> None:
    assert_trains_alike(Neighbors, "linformer_pytorch", torch.randn(7, 12))


class MaskedTokens(nn.Module):
    """Pretraining on hidden tokens, with other widths of embeddings and heads, and the loss of the hidden alone."""

    def __init__(self, package, **options):
        super().__init__()
        self.model = package.LinformerLM(num_tokens=13, **SMALL | {"dropout_tokens": 0.0} | options)

    def forward(self, tokens, hidden):
        logits = self.model(tokens.masked_fill(hidden, 12))
        labels = tokens.masked_fill(~hidden, 12)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=12)[None]


@pytest.mark.parametrize("options", [{"dim_d": 7}, {"emb_dim": 8, "activation": "relu"}], ids=str)
def test_pretraining_on_hidden_tokens(options: dict) -> None:
    tokens, hidden = torch.randint(12, (2, 11)), torch.rand(2, 11) < 0.4
    assert_trains_alike(lambda package: MaskedTokens(package, **options), "linformer_pytorch", tokens, hidden)


# The examples of linformer-pytorch, by what they build.
EXAMPLES = {
    "small": {"activation": "relu", "parameter_sharing": "none", "k_reduce_by_layer": 1},
    "convolution": {"method": "convolution"},
    "full attention": {"full_attention": True},
    "output projections": {"w_o_intermediate_dim": 6, "parameter_sharing": "none"},
    "inner width": {"ff_intermediate": 7, "parameter_sharing": "none", "depth": 3},
    "recomputed": {"checkpoint_level": "C1", "parameter_sharing": "kv"},
}


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_vectors(name: str) -> None:
    x = torch.randn(1, 11, 12, requires_grad=True)
    assert_trains_alike(lambda package: package.Linformer(**SMALL | EXAMPLES[name]), "linformer_pytorch", x)


class Translation(nn.Module):
    """Two language models as encoder and decoder."""

    def __init__(self, package):
        super().__init__()
        options = SMALL | {"num_tokens": 13, "parameter_sharing": "none", "k_reduce_by_layer": 1, "dropout_tokens": 0.0}
        self.encoder = package.LinformerLM(**options, return_emb=True)
        self.decoder = package.LinformerLM(**options, decoder_mode=True)

    def forward(self, x, y):
        return self.decoder(y, embeddings=self.encoder(x))


def test_an_encoder_and_a_decoder() -> None:
    assert_trains_alike(Translation, "linformer_pytorch", *torch.randint(13, (2, 2, 11)))


def test_a_patched_forward_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    x, called = torch.randn(2, 11, 12), []
    models = both(lambda package: package.Linformer(**SMALL), "linformer_pytorch")
    plain = models[1](x)
    for model in models:
        kind = type(model.seq[0].fn.heads[0])

        def forward(self, Q, K, V, before=kind.forward, **kwargs):
            called.append(Q.shape)
            return before(self, Q, K, V, **kwargs) * 2

        monkeypatch.setattr(kind, "forward", forward)
    older.assert_close(models[1](x), models[0](x))
    assert called == [(2, 11, 4)] * 12
    assert not torch.allclose(models[1](x), plain)


@pytest.mark.parametrize("library", LIBRARIES)
def test_everything_that_a_star_imports(library: str) -> None:
    for module in (f"{library}.{library}", library):
        theirs, mine = {}, {}
        older.original(module)
        exec(f"from {module} import *", theirs)
        exec(f"from longspan.compat.{module} import *", mine)
        names = (
            {name for name in theirs if not name.startswith("_")}
            - set(LIBRARIES)
            - {"padder", "visualizer", "reversible"}
        )
        assert names <= set(mine), names - set(mine)


MODELS = {
    "linformer": [
        ("Linformer", {"dim": 12, "seq_len": 11, "depth": 2, "heads": 3, "k": 4}),
        (
            "LinformerLM",
            {"num_tokens": 13, "dim": 12, "seq_len": 11, "depth": 1, "heads": 3, "k": 4, "reversible": True},
        ),
    ],
    "linformer_pytorch": [
        ("Linformer", SMALL),
        ("Linformer", SMALL | {"full_attention": True, "causal": True}),
        ("LinformerLM", SMALL | {"num_tokens": 13, "emb_dim": 8, "method": "convolution", "parameter_sharing": "none"}),
        ("LinformerLM", SMALL | {"num_tokens": 13, "method": "no_params", "return_emb": True}),
    ],
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_whole_models_that_the_original_pickled(library: str) -> None:
    for name, arguments in MODELS[library]:
        theirs = getattr(older.original(library), name)(**arguments).eval()
        buffer = io.BytesIO()
        torch.save(theirs, buffer)
        buffer.seek(0)
        with redirect_imports():
            mine = torch.load(buffer, weights_only=False)
        assert type(mine).__module__.startswith("longspan.compat.")
        x = torch.randint(13, (2, 11)) if "num_tokens" in arguments else torch.randn(2, 11, 12)
        older.assert_close(mine(x), theirs(x))
