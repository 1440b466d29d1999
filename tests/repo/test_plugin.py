"""examples/plugin: a package of its own, installed, whose mechanisms work by name wherever built-in ones do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"
NAMES = ("retention", "gated-retention")

# In a process of its own: what is installed is found when Python starts.
CODE = """
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
import longspan
from longspan.cli import main
from longspan.hf import LongspanConfig, LongspanForCausalLM
from longspan.mechanisms import _REGISTRY
from longspan.testing import check_mechanism

folder, name = Path(sys.argv[1]), sys.argv[2]
assert name not in _REGISTRY
check_mechanism(longspan.list_mechanisms()[name])

# Split with another mechanism, in a configuration that goes through JSON, and through transformers.
parts = [{"mechanism": name, "num_heads": 2}, {"mechanism": "local", "num_heads": 2, "window": 4}]
attention = longspan.AttentionConfig(num_heads=4, num_kv_heads=2, mechanism={"mechanism": "split", "parts": parts})
config = longspan.ModelConfig(dim=8, depth=2, causal=True, vocab_size=11, attention=attention)
model = LongspanForCausalLM(LongspanConfig(config)).eval()
model.save_pretrained(folder / "hf")
again = LongspanForCausalLM.from_pretrained(folder / "hf").eval()
prompt = torch.tensor([[1, 2, 3], [0, 4, 5]])
how = {"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]), "max_new_tokens": 5}
how |= {"do_sample": False, "pad_token_id": 0}
assert torch.equal(model.generate(prompt, **how), again.generate(prompt, **how))

# The command line: train, with the laws of a language model checked on the checkpoint, and generate.
corpus = folder / "corpus.txt"
corpus.write_text("one two three four five six seven eight nine ten " * 60)
sizes = {"preset": "tiny", "context": 32, "batch-size": 2, "model.dim": 16, "model.depth": 1, "steps": 4, "warmup": 1}
sizes |= {"model.attention.num_heads": 4, "model.attention.mechanism": name, "eval-every": 4, "eval-tokens": 100}
sizes |= {"sample-tokens": 4, "device": "cpu", "compile": "off", "precision": "fp32"}
words = [word for flag, value in sizes.items() for word in (f"--{flag}", str(value))]
main(["train", "--out", str(folder / "run"), "--data", str(corpus), *words])
trained = longspan.load(folder / "run" / "checkpoint").double().eval()
assert isinstance(trained.transformer.stack.branches[0].layer.mechanism, longspan.list_mechanisms()[name])
tokens = torch.randint(0, 256, (2, 23))
logits, state = trained.extend(tokens[:, :9], trained.new_state(2, dtype=torch.float64))
steps = [logits]
with torch.no_grad():
    for t in range(9, 23):
        logits, state = trained.extend(tokens[:, t : t + 1], state)
        steps.append(logits)
torch.testing.assert_close(torch.cat(steps, 1), trained(tokens), atol=1e-9, rtol=1e-9)
main(["generate", "--model", str(folder / "run"), "--prompt", "one ", "--max-tokens", "7", "--temperature", "0"])
told = longspan.generate(trained.float(), [list(b"one ")], 7, sampling=longspan.Sampling(temperature=0)).tokens[0]
print("\\nTOLD", bytes(told[-7:]).decode(errors="replace"))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(PLUGIN)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_mechanism_works_everywhere(name: str, installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning:longspan", "-c", CODE, str(tmp_path), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TOLD" in done.stdout


def test_its_files_are_short() -> None:
    files = list((PLUGIN / "src").rglob("*.py"))
    assert files
    for path in files:
        assert len(path.read_text().splitlines()) < 80, path.name
