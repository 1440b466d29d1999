"""local-attention's documents and training script, served by longspan; its models converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from older import assert_close, blocks, older_names, original
from test_compat_local import MODEL, VARIANTS

import longspan
from longspan.compat import import_hook
from longspan.compat.convert import convert_weights

SHAPES = [(2, 8, 2048, 64), (2, 8, 2048, 64), (8, 2057, 64), (1, 8192, 256)]


@pytest.mark.parametrize("number", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_documented_blocks(number: int) -> None:
    """Written for MindSpore, whose `ops` they use as torch has them: one import is exchanged."""
    found = blocks("local-attention-mindspore.md")
    assert len(found) == len(SHAPES)
    assert "from mindspore import ops" in found[number]
    code = found[number].replace("from mindspore import ops", "import torch as ops")
    with older_names() as names:
        exec(compile(code, f"block {number}", "exec"), names)
    out = names["logits" if number == 3 else "out"]
    assert out.shape == SHAPES[number]
    assert f"# {SHAPES[number]}" in found[number]
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("LocalTransformer")])
def test_conversion(variant: str, tmp_path: Path) -> None:
    """The original's weights as a longspan checkpoint: written, read, the same logits."""
    arguments = dict(MODEL)
    arguments |= {
        "LocalTransformer[streams1]": {"num_residual_streams": 1},
        "LocalTransformer[xpos]": {"use_xpos": True},
        "LocalTransformer[dynbias]": {"use_dynamic_pos_bias": True},
        "LocalTransformer[qk_rmsnorm]": {"qk_rmsnorm": True},
        "LocalTransformer[num_tokens_none]": {"num_tokens": None},
    }.get(variant, {})
    theirs = original("local_attention").LocalTransformer(**arguments).eval()
    longspan.save(convert_weights(theirs.state_dict(), "local-attention", arguments), tmp_path / "model")
    ours = longspan.load(tmp_path / "model").eval()
    x = torch.randn(2, 24, 32) if arguments["num_tokens"] is None else torch.randint(20, (2, 24))
    assert_close(ours(x), theirs(x))
    assert type(ours) is (longspan.Transformer if arguments["num_tokens"] is None else longspan.LanguageModel)


SCRIPT = """
import sys

import torch
from local_attention import LocalTransformer

steps, length, window = (int(x) for x in sys.argv[1:])
torch.manual_seed(0)
model = LocalTransformer(
    num_tokens=256, dim=32, depth=2, heads=2, dim_head=16, causal=True, max_seq_len=length,
    local_attn_window_size=window, use_xpos=False, use_dynamic_pos_bias=True
).cuda()
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog; " * 64))
optim = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(steps):
    model.train()
    start = torch.randint(len(text) - length - 1, (4,))
    batch = torch.stack([text[s : s + length + 1] for s in start]).cuda()
    loss = model(batch, return_loss=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    valid = model(text[None, : length + 1].cuda(), return_loss=True)
sample = model.generate(text[None, : length // 2].cuda(), length // 2)
print(type(model).__module__, losses[0], sum(losses[-3:]) / 3, valid.item(), *sample.shape)
"""


def test_training_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape of the library's enwik8 example: model, loss, optimizer, generation; nothing in it changed."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    import_hook.run(path, ["12", "64", "16"], device="cpu")
    module, first, last, valid, rows, tokens = capsys.readouterr().out.split()
    assert module == "longspan.compat.local_attention.transformer"
    assert float(last) < 0.9 * float(first)
    assert float(valid) < 0.9 * float(first)
    assert (int(rows), int(tokens)) == (1, 32)
