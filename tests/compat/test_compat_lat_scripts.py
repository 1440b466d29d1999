"""How public projects use linear-attention-transformer, in scripts of our own, on ours and on the original."""

import warnings

import older
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longspan.compat import linear_attention_transformer as ours

B = 2
WITHOUT_EFFECT = "without effect, as in the original: attn_dropout"


def library():
    return older.original("linear_attention_transformer")


def both(build):
    """What `build` makes of the original and of our package, with the same weights; it is trained one step."""
    made = []
    for package in (library(), ours):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", WITHOUT_EFFECT)
            made.append(build(package))
    made[1].load_state_dict(made[0].state_dict())
    return made


def assert_trains_alike(build, *inputs, steps=3):
    """Losses of a few steps of Adam are the original's."""
    losses = []
    for model in both(build):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(*inputs)
            loss = loss if loss.ndim == 0 else loss.square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class SpectrumEncoder(nn.Module):
    """Spectra of the channels of a recording as one sequence of tokens, with a token for each channel."""

    def __init__(self, package, dim=16, channels=3, window=10):
        super().__init__()
        self.window = window
        self.embed, self.channels = nn.Linear(window // 2 + 1, dim), nn.Embedding(channels, dim)
        self.transformer = package.LinearAttentionTransformer(
            dim=dim, heads=4, depth=2, max_seq_len=1024, attn_layer_dropout=0.0, attn_dropout=0.2
        )

    def forward(self, x):
        spectra = torch.fft.rfft(x.unfold(2, self.window, self.window)).abs()  # (B, channels, windows, bins)
        tokens = self.embed(spectra) + self.channels.weight[:, None]
        return self.transformer(tokens.flatten(1, 2)).mean(1)


class Recording(nn.Module):
    """A classifier of recordings."""

    def __init__(self, package, classes=5):
        super().__init__()
        self.encoder = SpectrumEncoder(package)
        self.head = nn.Sequential(nn.ELU(), nn.Linear(16, classes))

    def forward(self, x):
        return self.head(self.encoder(x))


def test_recordings_of_brain_waves():
    with pytest.warns(UserWarning, match=WITHOUT_EFFECT):
        Recording(ours)
    assert_trains_alike(Recording, torch.randn(B, 3, 110))


def test_fine_tuning_the_last_block_with_another_head():
    def build(package):
        model = Recording(package)
        for p in model.encoder.parameters():
            p.requires_grad = False
        for block in model.encoder.transformer.layers.layers[-1:]:
            for layer in block:
                for p in layer.parameters():
                    p.requires_grad = True
        model.head = nn.Linear(16, 7)
        return model

    assert_trains_alike(build, torch.randn(B, 3, 110))


def test_merged_tokens():
    """Classes of modules are changed in place: attention hands on its keys, by which tokens are merged."""

    def build(package):
        model = Recording(package)
        sequence = model.encoder.transformer.layers
        attention = type(sequence.layers[0][0].fn)
        held = {}

        class Remembering(attention):
            def forward(self, x, **kwargs):
                q, k, v = (
                    layer(x).unflatten(2, (self.heads, self.d_heads)).transpose(1, 2)
                    for layer in (self.to_q, self.to_k, self.to_v)
                )
                held["keys"] = k.mean(1)
                out = self.global_attn_fn(q, k, v, kv_mask=kwargs.get("input_mask"))
                return self.dropout(self.to_out(out.transpose(1, 2).flatten(2)))

        class Merging(type(sequence)):
            def forward(self, x, **kwargs):
                for f, g in self.layers:
                    x = x + f(x)
                    a, b = held["keys"][:, :-1:2], held["keys"][:, 1::2]
                    nearest = F.cosine_similarity(a[:, : b.shape[1]], b, dim=-1).argmax(1)
                    keep = torch.arange(x.shape[1]).expand(B, -1) != 2 * nearest[:, None] + 1
                    x = x[keep].unflatten(0, (B, -1))
                    x = x + g(x)
                return x

        sequence.__class__ = Merging
        for pair in sequence.layers:
            pair[0].fn.__class__ = Remembering
        return model

    assert_trains_alike(build, torch.randn(B, 3, 110))


class Imputer(nn.Module):
    """Attention along time, then along the series, of a table of series."""

    def __init__(self, package):
        super().__init__()
        sizes = {"dim": 16, "depth": 1, "heads": 4, "max_seq_len": 256, "n_local_attn_heads": 0}
        # Projects give a window of 0 where there are no local heads.
        self.time, self.series = (package.LinearAttentionTransformer(**sizes, local_attn_window_size=0) for _ in "ab")
        self.in_projection, self.out_projection = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1)

    def forward(self, x):
        rows, length = x.shape[1:]
        y = self.in_projection(x.flatten(0, 1)[:, None])  # (B · rows, 16, length)
        y = self.time(y.mT).unflatten(0, (-1, rows)).transpose(1, 2)  # (B, length, rows, 16)
        y = self.series(y.flatten(0, 1)).unflatten(0, (-1, length)).transpose(1, 2)
        return self.out_projection(y.flatten(0, 1).mT).view(x.shape)


def test_diffusion_of_time_series():
    assert_trains_alike(Imputer, torch.randn(B, 3, 11))


def test_windows_of_no_tokens_need_no_heads():
    with pytest.raises(ValueError, match=r"local_attn_window_size must be at least 1 .* got 0"):
        ours.LinearAttentionTransformer(8, 1, 16, heads=2, n_local_attn_heads=1, local_attn_window_size=0)
    with pytest.raises(ValueError, match=r"local_attn_window_size must be at least 1 .* got 0"):
        ours.LinearAttentionTransformerLM(9, 8, 1, 16, heads=2, local_attn_window_size=0)
    model = ours.LinearAttentionTransformerLM(9, 8, 1, 16, 2, local_attn_window_size=0, use_axial_pos_emb=False)
    assert model(torch.ones(1, 5, dtype=torch.int64)).shape == (1, 5, 9)


class Residual(nn.Module):
    """x + weight · fn(x), with a weight that starts at zero."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        return x + self.weight * self.fn(x)


class Discriminator(nn.Module):
    """Convolutions that halve the image, each followed by attention between its pixels."""

    def __init__(self, package):
        super().__init__()
        layers, channels = [], 3
        for out, options in ((4, {"norm_queries": True}), (6, {"key_dim": 6, "value_dim": 6, "heads": 4})):
            layers += [nn.Conv2d(channels, out, 3, padding=1, stride=2), nn.LeakyReLU(0.2)]
            layers.append(Residual(package.ImageLinearAttention(out, **options)))
            layers.append(
                Residual(nn.Sequential(nn.Conv2d(out, 2 * out, 1), nn.LeakyReLU(0.2), nn.Conv2d(2 * out, out, 1)))
            )
            channels = out
        self.net, self.score = nn.Sequential(*layers), nn.Linear(6, 1)

    def forward(self, x):
        return F.softplus(self.score(self.net(x).mean((2, 3)))).mean()


def test_an_image_discriminator():
    assert_trains_alike(Discriminator, torch.randn(B, 3, 12, 8))


class Sequences(nn.Module):
    """A classifier of proteins or genes: embeddings of residues, padded, of which the first is used."""

    def __init__(self, package):
        super().__init__()
        self.encoder = package.LinearAttentionTransformerLM(
            num_tokens=26,
            dim=16,
            heads=4,
            depth=2,
            max_seq_len=24,
            dim_head=4,
            reversible=True,
            n_local_attn_heads=2,
            local_attn_window_size=8,
            return_embeddings=True,
        )
        self.classify = nn.Linear(16, 2)

    def forward(self, tokens):
        hidden = self.encoder(tokens, input_mask=tokens != 0)
        return self.classify(hidden[:, 0])


def test_proteins():
    tokens = torch.randint(1, 26, (B, 24)).masked_fill(torch.arange(24) >= torch.tensor([[24], [13]]), 0)
    assert_trains_alike(Sequences, tokens)


class TextToImage(nn.Module):
    """An encoder of captions and a decoder of image tokens."""

    def __init__(self, package):
        super().__init__()
        sizes = {"dim": 16, "depth": 1, "heads": 2, "dim_head": 8, "local_attn_window_size": 4}
        self.text = package.LinearAttentionTransformerLM(num_tokens=13, max_seq_len=8, return_embeddings=True, **sizes)
        image = package.LinearAttentionTransformerLM(
            num_tokens=11,
            max_seq_len=16,
            causal=True,
            receives_context=True,
            n_local_attn_heads=1,
            blindspot_size=2,
            context_linformer_settings=package.LinformerContextSettings(seq_len=8, k=3),
            **sizes,
        )
        self.image = package.AutoregressiveWrapper(image)

    def forward(self, text, image):
        return self.image(image, return_loss=True, context=self.text(text))


def test_images_from_text():
    text, image = torch.randint(0, 13, (B, 8)), torch.randint(0, 11, (B, 17))
    assert_trains_alike(TextToImage, text, image)
    said = []
    for model in both(TextToImage):
        context = model.eval().text(text)
        torch.manual_seed(3)
        said.append(model.image.generate(image[:, :1], 15, context=context, filter_thres=0.5))
    assert said[0].shape == (B, 15)
    assert torch.equal(*said)


class Block(nn.Module):
    """A block of a neural operator, with attention of the package between the points of a mesh."""

    def __init__(self, package, dim=12):
        super().__init__()
        attention = package.linear_attention_transformer.SelfAttention
        self.attention = attention(dim, 3, dim_head=4, dropout=0.0)
        self.cross = attention(dim, 3, dim_head=4, receives_context=True)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in "ab")

    def forward(self, x, mesh):
        x = x + self.attention(self.norms[0](x))
        return x + self.cross(self.norms[1](x), context=mesh)


def test_a_neural_operator():
    assert_trains_alike(Block, torch.randn(B, 11, 12), torch.randn(B, 7, 12))


def test_style_transfer():
    """Patches of an image as vectors, with every kind of attention at once."""

    def build(package):
        return package.LinearAttentionTransformer(
            dim=12,
            heads=3,
            depth=2,
            max_seq_len=30,
            shift_tokens=True,
            reversible=True,
            attend_axially=True,
            n_local_attn_heads=(1, 2),
            local_attn_window_size=5,
        )

    assert_trains_alike(build, torch.randn(B, 30, 12).requires_grad_())


def test_vectors_of_any_length():
    def build(package):
        model = package.LinearAttentionTransformer(
            12, 1, 30, 3, causal=True, n_local_attn_heads=1, local_attn_window_size=5
        )
        from importlib import import_module

        return import_module(f"{package.__name__}.autopadder").Autopadder(model)

    assert_trains_alike(build, torch.randn(B, 13, 12))


def test_music():
    """A reversible, gated model with token shift and rotary positions; the original leaves its gates out."""

    def build(package, **more):
        model = package.LinearAttentionTransformerLM(
            num_tokens=17,
            dim=16,
            heads=2,
            depth=2,
            max_seq_len=32,
            causal=True,
            dim_head=8,
            blindspot_size=4,
            n_local_attn_heads=2,
            local_attn_window_size=8,
            reversible=True,
            ff_chunks=2,
            ff_glu=True,
            shift_tokens=True,
            use_rotary_emb=True,
            **more,
        )
        return package.AutoregressiveWrapper(model)

    tokens = torch.randint(0, 17, (B, 33))
    assert_trains_alike(lambda package: build(package, **{"faithful": True} if package is ours else {}), tokens, True)
    wrapper = build(ours)
    assert wrapper.net.net.transformer.layers.blocks[0].g.net.fn.fn.fn.w1.out_features == 2 * 4 * 16
    loss = wrapper(tokens, return_loss=True)
    loss.backward()
    assert wrapper.generate(tokens[:, :3], 9).shape == (B, 9)
