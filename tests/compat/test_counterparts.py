"""The page of counterparts: every option of the older libraries is there, and all of its code builds and runs."""

import re
from pathlib import Path

import pytest
import torch

from longspan import build_mechanism
from longspan.layout import TokenLayout
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import Attention, FeedForward
from longspan.models.residual import ResidualBranch, Stack
from longspan.models.transformer import EncoderDecoder, LanguageModel, Transformer
from longspan.models.vision import ImageAttention, efficient_attention

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "counterparts.md").read_text()
REFERENCE = ROOT.parent / "shared" / "reference" / "public_api.md"
ROWS = re.findall(r"^\| (?!option|---)(.+?) \| .+? \| `(.+)` \|$", PAGE, flags=re.MULTILINE)


def small(**fields):
    return ModelConfig(**{"dim": 64, "depth": 2, **fields})


NAMES = {
    "A": AttentionConfig,
    "F": FeedForwardConfig,
    "L": LegacyConfig,
    "M": small,
    "mechanism": lambda name, **options: build_mechanism(name, 8, 64, **options),
    "EncoderDecoder": EncoderDecoder,
    "ImageAttention": ImageAttention,
    "efficient_attention": efficient_attention,
    "Stack": Stack,
    "ResidualBranch": ResidualBranch,
    "Attention": Attention,
    "FeedForward": FeedForward,
    "torch": torch,
}


@pytest.mark.parametrize(("option", "code"), ROWS, ids=[f"{i}-{option}" for i, (option, _) in enumerate(ROWS)])
def test_counterpart_builds_and_runs(option, code):
    built = eval(code, NAMES)
    x = torch.randn(2, 9, 64)
    if isinstance(built, ModelConfig):
        how = {} if built.cross is None else {"context": torch.randn(2, 7, 64)}
        if built.vocab_size is None:
            assert Transformer(built)(x, **how).shape == x.shape
        else:
            tokens = torch.randint(0, built.vocab_size, (2, 9))
            assert LanguageModel(built)(tokens, **how).shape == (2, 9, built.vocab_size)
    elif isinstance(built, Stack):
        assert built(x, TokenLayout.of(x, causal=False)).shape == x.shape
    elif isinstance(built, EncoderDecoder):
        assert built(torch.randint(1, 9, (2, 5)), torch.randint(1, 9, (2, 6))).isfinite()
    elif isinstance(built, ImageAttention):
        assert built(torch.randn(2, 16, 5, 6)).shape == (2, 8, 5, 6)
    else:
        q = torch.randn(2, 9, 8, 64)
        assert built(q, q, q).isfinite().all()


def test_every_option_is_on_the_page():
    if not REFERENCE.exists():
        pytest.skip("the older libraries' signatures are not beside this repository")
    # Arguments that are modules, tensors or parts of another option's entry.
    elsewhere = {"net", "self", "instance", "dim_heads", "local_heads", "E_proj", "F_proj", "causal_mask", "head_dim"}
    elsewhere |= {"input_channels", "output_channels", "ff_dim", "kwargs", "use_axial_pos_emb", "method"}
    words = set(re.findall(r"\w+", " ".join(option for option, _ in ROWS)))
    missing = set()
    for signature in re.findall(r"`__init__\((.+?)\)`$", REFERENCE.read_text(), flags=re.MULTILINE):
        for name in re.findall(r"(?:^|, )\*{0,2}(\w+)", re.sub(r"\([^)]*\)", "", signature)):
            stem = re.sub(r"^(enc|dec)_", "", name)
            if stem not in words | elsewhere:
                missing.add(name)
    assert missing == set()
