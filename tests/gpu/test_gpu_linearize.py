"""`longspan linearize` on a GPU: compiled stages, text that the teacher writes, decode steps of the student."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tyro")

from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from longspan.generation.generate import generate, prefill
from longspan.generation.sampling import Sampling
from longspan.hf import to_language_model
from longspan.train.linearize.sampling import _Writer
from longspan.train.linearize.stages import Distillation, compile_layers
from longspan.train.linearize.student import build_student
from longspan.train.linearize.teacher import Teacher

SIZES = {
    "vocab_size": 509,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
NEOX = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 6}


def build() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False).cuda()


def gradients(compiled: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    teacher = build()
    student = build_student(teacher, {"mechanism": "mixture", "sink": True}, []).requires_grad_(True)
    tokens = torch.randint(509, (2, 257), generator=torch.Generator().manual_seed(5)).cuda()
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
    compile_layers((teacher, student), compiled)
    with torch.autocast("cuda", torch.bfloat16):
        losses = Distillation(teacher, student, 0.1, compiled).backward(tokens, targets, 1.0)
    return losses, {name: x.grad for name, x in student.named_parameters() if x.grad is not None}


def test_compiled_layers() -> None:
    (losses, grads), (expected, others) = gradients(True), gradients(False)
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=1e-4)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        if others[name].norm() > 1e-6:
            assert (grad - others[name]).norm() < 0.1 * others[name].norm(), name


def test_text_that_the_teacher_writes() -> None:
    """It is likely: its loss under the teacher is near the entropy, a little below it without unlikely tokens."""
    teacher = build()
    teacher.model.embed_tokens.weight.mul_(20)
    writer = _Writer(Teacher(teacher, None, False), 67, torch.device("cuda"))
    rows = writer.write([[7], [11, 13], [17, 19, 23]] * 7, range(21))
    assert rows.shape == (21, 67)
    assert np.array_equal(rows, writer.write([[7], [11, 13], [17, 19, 23]] * 7, range(21)))
    tokens = torch.from_numpy(rows).cuda()
    logits = teacher(tokens).logits[:, 3:-1].log_softmax(-1)
    loss = -logits.gather(2, tokens[:, 4:, None]).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    assert 0.7 * entropy < loss < 1.05 * entropy


TEACHERS = {
    "llama": build,
    "phi": lambda: PhiForCausalLM(PhiConfig(**{name: x for name, x in SIZES.items() if name != "head_dim"})),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=509, intermediate_size=320, **NEOX)),
}


@pytest.mark.parametrize("family", TEACHERS)
def test_the_student_decodes(family: str) -> None:
    """A step of the decode loop gives the logits that reading all tokens gives."""
    torch.manual_seed(3)
    teacher = TEACHERS[family]().eval().requires_grad_(False)
    student = build_student(teacher, {"mechanism": "mixture", "sink": True}, []).cuda()
    native = to_language_model(student).cuda()
    tokens = torch.randint(509, (2, 131)).cuda()
    torch.testing.assert_close(native(tokens), student(tokens).logits, rtol=1e-3, atol=1e-3)
    prompts = [torch.randint(509, (size,)).cuda() for size in (63, 131, 200)]
    greedy = Sampling(temperature=0)
    for prompt, tokens in zip(prompts, generate(native, prompts, 19, sampling=greedy).tokens, strict=True):
        read = prompt
        for token in tokens:
            logits = prefill(native, [read]).logits[0]
            assert logits[token] > logits.max() - 1e-3
            read = torch.cat([read, torch.tensor([token]).cuda()])
