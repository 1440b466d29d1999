"""How public projects use performer-pytorch, in scripts of our own, on ours and on the original."""

import copy
import io
import warnings
from contextlib import redirect_stdout
from importlib import import_module

import older
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from longspan.compat import faithful
from longspan.compat import performer_pytorch as ours
from longspan.compat.import_hook import redirect_imports

B = 2


def library():
    return older.original("performer_pytorch")


def inner(package):
    """The module inside the package that defines most names."""
    return import_module(f"{package.__name__}.performer_pytorch")


def both(build):
    """What `build` makes of the original and of our package, with the same weights."""
    made = []
    for package in (library(), ours):
        torch.manual_seed(0)
        with redirect_stdout(io.StringIO()):
            made.append(build(package))
    made[1].load_state_dict(made[0].state_dict())
    return made


def assert_trains_alike(build, *inputs, steps=3, **named):
    """Losses of a few steps of Adam are the original's."""
    losses = []
    for model in both(build):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for _ in range(steps):
            optimizer.zero_grad()
            out = model(*inputs, **named)
            loss = out if out.ndim == 0 else out.square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(set(losses[0])) == steps


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# Single cells: genes are positions, binned expression is the vocabulary.

GENES, BINS, CELL = 19, 7, 16


class GenePositions(nn.Module):
    """Positions from vectors of genes that were trained elsewhere, and one for the whole cell."""

    def __init__(self):
        super().__init__()
        vectors = torch.cat([random(GENES, CELL), torch.zeros(1, CELL)])
        self.emb = nn.Embedding.from_pretrained(vectors)

    def forward(self, x):
        return self.emb(torch.arange(x.shape[1], device=x.device))


class CellHead(nn.Module):
    """A head in the place of to_out: a convolution over the features of each gene, then three dense layers."""

    def __init__(self, dropout=0.0, h_dim=11, out_dim=5):
        super().__init__()
        self.conv1, self.act = nn.Conv2d(1, 1, (1, CELL)), nn.ReLU()
        self.fc1, self.act1, self.dropout1 = nn.Linear(GENES + 1, 13), nn.ReLU(), nn.Dropout(dropout)
        self.fc2, self.act2, self.dropout2 = nn.Linear(13, h_dim), nn.ReLU(), nn.Dropout(dropout)
        self.fc3 = nn.Linear(h_dim, out_dim)

    def forward(self, x):
        x = self.act(self.conv1(x[:, None])).flatten(1)
        x = self.dropout1(self.act1(self.fc1(x)))
        return self.fc3(self.dropout2(self.act2(self.fc2(x))))


def cell_model(package, g2v_position_emb=True):
    model = package.PerformerLM(
        num_tokens=BINS, dim=CELL, depth=3, max_seq_len=GENES + 1, heads=2, local_attn_heads=0, dim_head=8
    )
    if g2v_position_emb:
        model.pos_emb, model.layer_pos_emb = GenePositions(), inner(package).Always(None)
    return model


def test_cells_are_pretrained_by_masking():
    class Masked(nn.Module):
        def __init__(self, package):
            super().__init__()
            self.model = cell_model(package)

        def forward(self, counts, labels):
            return F.cross_entropy(self.model(counts).transpose(1, 2), labels, ignore_index=BINS - 1)

    counts = torch.randint(BINS - 1, (B, GENES + 1), generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(GENES + 1) % 5 == 2
    labels = counts.masked_fill(~hidden, BINS - 1)
    assert_trains_alike(Masked, counts.masked_fill(hidden, BINS - 1), labels)


@pytest.mark.parametrize("g2v_position_emb", [False, True])
def test_cells_are_annotated_by_another_head_on_a_frozen_model(g2v_position_emb):
    pretrained = cell_model(library(), g2v_position_emb).state_dict()

    def build(package):
        model = cell_model(package, g2v_position_emb)
        model.load_state_dict(pretrained)
        for p in model.parameters():
            p.requires_grad = False
        for p in model.norm.parameters():
            p.requires_grad = True
        for p in model.performer.net.layers[-2].parameters():
            p.requires_grad = True
        model.to_out = CellHead(dropout=0.0, h_dim=11, out_dim=5)
        return model

    counts = torch.randint(BINS, (B, GENES + 1), generator=torch.Generator().manual_seed(2))
    theirs, mine = both(build)
    trained = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (theirs, mine)]
    assert trained[0] == trained[1]
    assert any(name.startswith("performer.net.layers.1.") for name in trained[0])
    assert_trains_alike(build, counts)
    for encodings in (False, True):
        out = [model.eval()(counts, return_encodings=encodings) for model in (theirs, mine)]
        older.assert_close(out[1], out[0])


def test_layers_of_cells_are_read_by_hooks():
    counts, found = torch.randint(BINS, (B, GENES + 1)), []
    for model in both(cell_model):
        held = {}
        for i, (attention, _) in enumerate(model.performer.net.layers):
            attention.fn.register_forward_hook(
                lambda module, args, out, i=i, held=held: held.__setitem__(i, out.detach())
            )
        model.performer.net.layers[0][0].fn.to_q.register_forward_pre_hook(
            lambda module, args, held=held: held.__setitem__("input", args[0].detach())
        )
        model.eval()(counts)
        found.append(held)
    assert list(found[0]) == list(found[1])
    for name, tensor in found[0].items():
        older.assert_close(found[1][name], tensor, str(name))


# Graphs: nodes of several graphs as padded rows.


class GraphLayer(nn.Module):
    """Messages along edges beside attention over all nodes of a graph, both with a residual and a norm."""

    def __init__(self, package, dim=12):
        super().__init__()
        self.local, self.norm1, self.norm2 = nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.self_attn = package.SelfAttention(dim=dim, heads=3, dropout=0.0, causal=False)
        self.ff1, self.ff2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, h, adjacency, mask):
        nodes = h[mask]
        local = self.norm1(nodes + (adjacency @ self.local(h))[mask].relu())
        dense = torch.zeros_like(h)
        dense[mask] = nodes
        attention = self.norm2(nodes + self.self_attn(dense, mask=mask)[mask])
        out = local + attention
        return out + self.ff2(self.ff1(out).relu())


def test_graphs_of_one_size_and_of_several():
    h, adjacency = random(3, 11, 12), (random(3, 11, 11) > 0.5).float()
    whole = torch.ones(3, 11, dtype=torch.bool)
    assert_trains_alike(GraphLayer, h, adjacency, whole)
    mask = torch.arange(11) < torch.tensor([[11], [7], [4]])
    theirs, mine = (layer.self_attn for layer in both(GraphLayer))
    alone = mine(h[1:2, :7])
    older.assert_close(mine(h, mask=mask)[1:2, :7], alone)  # The padding of a batch changes nothing here,
    assert (theirs(h, mask=mask)[1:2, :7] - alone).abs().max() > 0.01 * alone.abs().max()  # but does there.
    with faithful():
        older.assert_close(both(GraphLayer)[1].self_attn(h, mask=mask)[mask], theirs(h, mask=mask)[mask])


# Attention without projections, in other libraries' models.


class VisionAttention(nn.Module):
    """Queries, keys and values of a vision transformer, with FastAttention between them."""

    def __init__(self, package, dim=12, heads=3):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.fast_attn = package.FastAttention(dim_heads=dim // heads, nb_features=9, causal=False)

    def forward(self, x):
        q, k, v = (f(x).view(len(x), -1, self.heads, 4).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.fast_attn(q, k, v).transpose(1, 2).reshape(x.shape)


def test_fast_attention_in_a_vision_transformer():
    assert_trains_alike(VisionAttention, random(B, 17, 12))


def test_a_subclass_of_fast_attention():
    def build(package):
        class Multihead(package.FastAttention):
            def __init__(self, dim, heads):
                super().__init__(dim_heads=dim // heads, nb_features=7)
                self.heads, self.proj = heads, nn.Linear(dim, 3 * dim)

            def forward(self, x):
                q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.proj(x).chunk(3, -1))
                return super().forward(q, k, v).transpose(1, 2).flatten(2)

        return Multihead(12, 3)

    assert_trains_alike(build, random(B, 11, 12))


def test_electrons_attend_as_one_head_with_features_of_their_own_number():
    def build(package):
        return package.FastAttention(dim_heads=8, nb_features=8, causal=False)

    theirs, mine = both(build)
    q, k, v = (random(1, 1, n, 8)[:, :, :7] for n in (7, 8, 9))
    older.assert_close(mine(q=q, k=k, v=v), theirs(q=q, k=k, v=v))


def test_kernels_for_layers_of_ones_own():
    def build(package):
        names = inner(package)

        class Kernelized(nn.Module):
            """x W₁ and W₂ as queries and keys of a kernel; random features are redrawn by hand."""

            def __init__(self):
                super().__init__()
                self.keys, self.values = nn.Parameter(random(1, 1, 9, 12)), nn.Parameter(random(1, 1, 9, 5))
                features = names.gaussian_orthogonal_random_matrix(nb_rows=15, nb_columns=12, scaling=0)
                self.register_buffer("projection", features.abs())

            def forward(self, x):
                phi = {"kernel_fn": nn.ReLU(), "projection_matrix": self.projection, "device": x.device}
                q, k = (names.generalized_kernel(y, **phi) for y in (x[:, None], self.keys))
                soft = names.softmax_kernel(x[:, None], projection_matrix=self.projection, is_query=True)
                return names.linear_attention(q, k, self.values)[:, 0] + soft.mean()

        return Kernelized()

    assert_trains_alike(build, random(B, 7, 12))


# Models of one's own from the parts.


def test_a_stack_of_ones_own_from_the_parts():
    def build(package):
        names, sequences = inner(package), import_module(f"{package.__name__}.reversible")

        class Stack(nn.Module):
            def __init__(self, dim=12, depth=2):
                super().__init__()
                layers = nn.ModuleList()
                for i in range(depth):
                    attention = names.SelfAttention(dim, heads=3, dim_head=4, causal=False, nb_features=7)
                    ff = names.Chunk(2, names.FeedForward(dim, mult=2, glu=True), along_dim=1)
                    wrap = names.PreLayerNorm if i else names.PreScaleNorm
                    layers.append(nn.ModuleList([wrap(dim, attention), names.ReZero(ff)]))
                route = ((True, False),) * depth
                self.net = sequences.SequentialSequence(layers, args_route={"pos_emb": route, "mask": route})
                self.pos_emb = names.FixedPositionalEmbedding(dim, 31)
                self.layer_pos_emb = names.FixedPositionalEmbedding(4, 31)
                self.proj_updater = names.ProjectionUpdater(self.net, 1000)

            def forward(self, x):
                self.proj_updater.redraw_projections()
                x = x + self.pos_emb(x)
                return self.net(x, pos_emb=self.layer_pos_emb(x))

        return Stack()

    assert_trains_alike(build, random(B, 11, 12))
    for model in both(build):
        fast = inner(ours if "longspan" in type(model.proj_updater).__module__ else library()).FastAttention
        assert len([m for m in model.modules() if isinstance(m, fast)]) == 2
        assert len(model.proj_updater.state_dict()) == 1 + len(model.net.state_dict())


def test_a_body_under_embeddings_of_ones_own():
    def build(package):
        class Encoder(nn.Module):
            """Two sequences through one body; their pooled vectors are compared."""

            def __init__(self):
                super().__init__()
                self.token_emb, self.pos_emb = nn.Embedding(13, 12), nn.Embedding(17, 12)
                heads = inner(package).cast_tuple(0)
                self.performer = package.Performer(12, 2, 3, 4, heads, 5, False, 2, None, 1000, False, 1)
                self.norm = nn.LayerNorm(12)

            def fix_projection_matrices_(self):
                names = inner(package)
                for fast in names.find_modules(self, names.FastAttention):
                    fast.redraw_projection_matrix(names.get_module_device(self))

            def pooled(self, x):
                x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1]))
                return self.norm(self.performer(x)).mean(1)

            def forward(self, a, b):
                return 1 - F.cosine_similarity(self.pooled(a), self.pooled(b)).mean()

        return Encoder()

    a, b = (torch.randint(13, (B, n), generator=torch.Generator().manual_seed(n)) for n in (11, 7))
    assert_trains_alike(build, a, b)
    mine = both(build)[1]
    before = mine.pooled(a)
    mine.fix_projection_matrices_()
    assert not torch.allclose(mine.pooled(a), before)


def test_images_in_blocks_that_are_recomputed():
    def build(package):
        class Blocks(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.ModuleList(package.SelfAttention(dim=12, heads=3) for _ in range(2))

            def forward(self, x):
                x = x.flatten(2).transpose(1, 2)
                for attention in self.attention:
                    x = x + checkpoint(attention, x, use_reentrant=False)
                return x

        return Blocks()

    assert_trains_alike(build, random(B, 12, 3, 5))


def test_recordings_of_brain_waves_with_a_class_token():
    def build(package):
        class Waves(nn.Module):
            def __init__(self, dim=12):
                super().__init__()
                self.patches = nn.Conv1d(3, dim, 8, 8)
                self.cls = nn.Parameter(torch.zeros(1, 1, dim))
                self.body = package.Performer(
                    dim=dim, depth=1, heads=3, dim_head=4, local_attn_heads=1, local_window_size=6
                )
                self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4))

            def forward(self, x):
                x = self.patches(x).transpose(1, 2)
                x = self.body(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))
                return self.head(x[:, 0])

        return Waves()

    assert_trains_alike(build, random(B, 3, 88))


def test_proteins_from_features_and_an_average_of_weights():
    def build(package):
        return package.PerformerLM(
            num_tokens=13, max_seq_len=31, dim=12, depth=2, heads=3, dim_head=4, causal=False, tie_embed=True,
            generalized_attention=True, kernel_fn=nn.ReLU(), use_rezero=False, ff_glu=True,
        )  # fmt: skip

    tokens = torch.randint(13, (B, 17), generator=torch.Generator().manual_seed(3))
    assert_trains_alike(build, tokens)
    theirs, mine = both(build)
    averages = [copy.deepcopy(model) for model in (theirs, mine)]
    with torch.no_grad():
        for average in averages:
            for p in average.parameters():
                p.mul_(0.9).add_(0.1)
    older.assert_close(averages[1](tokens), averages[0](tokens))


# The original's own examples.


def test_copying_is_learned_by_encoder_and_decoder():
    """A sequence is read by the encoder and written twice by the decoder; greedy decoding then repeats it."""
    torch.manual_seed(0)
    tokens, length = 7, 5
    sides = {"num_tokens": tokens, "depth": 1, "heads": 3, "dim_head": 8, "max_seq_len": 2 * length + 3}
    model = ours.PerformerEncDec(
        dim=24, **{f"{side}_{name}": value for side in ("enc", "dec") for name, value in sides.items()}, dec_ff_mult=2
    )
    mask = torch.ones(32, length, dtype=torch.bool)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        source = torch.randint(2, tokens, (32, length))
        target = torch.cat([torch.ones(32, 1, dtype=torch.int64), source, source], 1)
        loss = model(source, target, enc_mask=mask, return_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    start = torch.ones(1, 1, dtype=torch.int64)
    sample = model.eval().generate(source[:1], start, length, enc_mask=mask[:1])
    assert sample.shape == (1, length)


def test_byte_models_train_under_autocast():
    losses = []
    for model in both(
        lambda package: package.AutoregressiveWrapper(
            package.PerformerLM(
                num_tokens=256, dim=24, depth=3, max_seq_len=32, heads=4, dim_head=6, causal=True, reversible=True,
                nb_features=9, use_scalenorm=True, shift_tokens=True, local_attn_heads=(4, 2, 1), local_window_size=8,
            )
        )
    ):  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        data = torch.randint(1, 256, (B, 33), generator=torch.Generator().manual_seed(4))
        losses.append([])
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data, return_loss=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_star_imports_bring_what_the_original_imports():
    pytest.importorskip("einops", reason="the original imports it")
    with redirect_imports(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict = {}
        exec("from performer_pytorch.performer_pytorch import *", names)
    assert names["PerformerLM"] is ours.PerformerLM
    used = {"torch", "nn", "F", "math", "partial", "rearrange", "repeat", "LocalAttention", "SequentialSequence"}
    assert used <= set(names)
    missing = {name for name in vars(inner(library())) if not name.startswith("_")} - set(names)
    assert missing <= {"autocast", "contextmanager", "LooseVersion", "TORCH_GE_1_8_0", "APEX_AVAILABLE", "amp"}
