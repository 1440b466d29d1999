"""performer-pytorch's README, block by block, and a training script of its kind through `longspan run`."""

import re
import resource
import subprocess
import sys

import pytest
import torch
from older import blocks, older_names

from longspan.compat import import_hook

# An expression, or an assignment, whose comment promises a shape.
_PROMISE = re.compile(r"^(?:\w+ = )?(\w+\(.*\)) # (\([\d, ]+\))", re.MULTILINE)


def run(*texts):
    """The shapes that blocks, one after the other in one namespace, promise and give."""
    with older_names() as names:
        names["shapes"] = []
        for text in texts:
            checked = _PROMISE.sub(r"shapes.append((\2, tuple(\1.shape)))", text)
            exec(compile(checked, "README", "exec"), names)
        return names, names["shapes"]


def readme():
    found = blocks("performer-pytorch.md")
    assert len(found) == 7
    return found


@pytest.mark.parametrize("index", [1, 3, 4, 5])
def test_blocks(index):
    _, shapes = run(readme()[index])
    assert len(shapes) == 1
    promised, given = shapes[0]
    assert given == promised


@pytest.mark.slow
def test_the_language_model_and_its_fixed_projections():
    names, shapes = run(readme()[0], readme()[6])
    assert shapes == [((1, 2048, 20000), (1, 2048, 20000))]
    assert names["model"].performer.proj_updater.feature_redraw_interval is None


def smaller(block, **sizes):
    for name, size in sizes.items():
        block, count = re.subn(rf"\b{name} = [\d_]+", f"{name} = {size}", block)
        assert count, name
    return block


def test_the_language_model_at_a_smaller_size():
    text = smaller(readme()[0], num_tokens=97, depth=2, dim=64, local_window_size=16, max_seq_len=128)
    text = text.replace("20000, (1, 2048)", "97, (1, 128)").replace("(1, 2048, 20000)", "(1, 128, 97)")
    names, shapes = run(text, readme()[6])
    assert shapes == [((1, 128, 97), (1, 128, 97))]
    assert names["model"].performer.proj_updater.feature_redraw_interval is None


def test_encoder_and_decoder_at_a_smaller_size(capsys):
    sizes = {"SRC_SEQ_LEN": 61, "TGT_SEQ_LEN": 61, "GENERATE_LEN": 23, "dim": 64, "enc_depth": 2, "dec_depth": 2}
    text = smaller(readme()[2], **sizes)
    text = text.replace("20000", "97")
    names, _ = run(text)
    rows, length = map(int, re.findall(r"\d+", capsys.readouterr().out.splitlines()[-1]))
    assert rows == 1
    assert 1 <= length <= 23
    model = names["enc_dec"]
    assert model.enc.token_emb is model.dec.net.token_emb
    assert names["loss"].isfinite()
    unused = {"enc.to_out.weight", "enc.to_out.bias"}
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if name not in unused)


@pytest.mark.slow
def test_encoder_and_decoder_need_less_than_eight_gigabytes(tmp_path):
    (tmp_path / "block.py").write_text(readme()[2])
    done = subprocess.run(
        [sys.executable, "-m", "longspan", "run", "--device", "cpu", str(tmp_path / "block.py")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows, length = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert rows == 1
    assert 1 <= length <= 512
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 8e6  # kB


TRAINING = """
import random, sys
import torch
from torch.utils.data import DataLoader, Dataset
from performer_pytorch import PerformerLM
from performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper

STEPS, SEQ_LEN, GENERATE = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
random.seed(0)

model = PerformerLM(
    num_tokens=256, dim=int(sys.argv[4]), depth=2, max_seq_len=SEQ_LEN, heads=4, dim_head=16, causal=True,
    reversible=True, nb_features=32, local_attn_heads=2, local_window_size=32,
)
model = AutoregressiveWrapper(model)
model.cuda()

text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 400))

class Windows(Dataset):
    def __getitem__(self, index):
        start = torch.randint(0, len(text) - SEQ_LEN - 1, (1,))
        return text[start : start + SEQ_LEN + 1].long().cuda()

    def __len__(self):
        return len(text) // SEQ_LEN

def cycle(loader):
    while True:
        yield from loader

loader = cycle(DataLoader(Windows(), batch_size=2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    model.train()
    for _ in range(2):
        loss = model(next(loader), return_loss=True) / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(2 * loss.item())
model.eval()
sample = model.generate(text[:32].cuda(), GENERATE)
print("losses", losses[0], losses[-1])
print("sample", len(sample), repr("".join(chr(max(32, token)) for token in sample.tolist())))
torch.save(model.state_dict(), sys.argv[5])
"""


def test_a_training_script_runs_unchanged(tmp_path, capsys):
    script, weights = tmp_path / "train.py", tmp_path / "weights.pt"
    script.write_text(TRAINING)
    arguments = ["12", "64", "24", "32", str(weights)]
    import_hook.run(script, arguments, device="cpu")
    printed = capsys.readouterr().out.splitlines()
    (_, first, last), (_, length, _) = (line.split(" ", 2) for line in printed[-2:])
    assert float(last) < float(first) - 0.5
    assert length == "24"
    held = torch.load(weights, weights_only=True)
    assert "net.performer.proj_updater.instance.blocks.1.g.net.fn.fn.w2.bias" in held
    assert held["net.performer.proj_updater.calls_since_last_redraw"] == 24
