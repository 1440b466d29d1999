"""lm-evaluation-harness on a longspan model: the perplexity of a text is that of `longspan eval`."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")

TASK = """task: own_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.mark.filterwarnings("ignore")  # the harness and what it stands on have their own
def test_the_harness_and_eval_agree(tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from longspan import AttentionConfig, ModelConfig
    from longspan.hf import ByteTokenizer, LongspanConfig, LongspanForCausalLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    config = ModelConfig(dim=32, depth=2, causal=True, vocab_size=256, attention=attention)
    model = LongspanForCausalLM(LongspanConfig(config)).eval()
    model.save_pretrained(tmp_path / "model")
    text = "\n" + "".join(f"{i}: the square of {i} is {i * i}.\n" for i in range(40))
    (tmp_path / "text.txt").write_text(text)
    # The harness puts a token of its own before a document; `longspan eval` scores what follows the first byte.
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text[1:]}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "text.jsonl"))

    harness = HFLM(pretrained=model, tokenizer=ByteTokenizer(), max_length=8192, prefix_token_id=ord("\n"))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(model=harness, tasks=["own_text"], task_manager=tasks)

    out = tmp_path / "eval.json"
    command = ["eval", "--model", tmp_path / "model", "--data", tmp_path / "text.txt", "--context", 8192, "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "longspan", *map(str, command)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    wanted = json.loads(out.read_text())["bits_per_byte"]
    assert found["results"]["own_text"]["bits_per_byte,none"] == pytest.approx(wanted, abs=1e-4)
