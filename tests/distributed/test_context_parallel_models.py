"""Models of every kind with their sequences divided over ranks, against one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from test_context_parallel import gradients, largest
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from longspan import AttentionConfig, Classifier, EncoderDecoder, LanguageModel, ModelConfig, Packing, Transformer
from longspan.distributed import context_parallel
from longspan.models.config import LegacyConfig

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin" / "src"
V, T, S = 13, 23, 17
CUTS, SOURCE_CUTS = [0, 11, 11, T], [0, 5, 7, S]


def pieces(rank: int) -> tuple[slice, slice]:
    return slice(*CUTS[rank : rank + 2]), slice(*SOURCE_CUTS[rank : rank + 2])


def config(mechanism: Any = "linear", causal: bool = True, **options: Any) -> ModelConfig:
    attention = AttentionConfig(num_heads=2, mechanism=mechanism)
    return ModelConfig(dim=8, causal=causal, attention=attention, **{"depth": 1, "vocab_size": V, **options})


def twins(kind: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind(*arguments, **options).double())
    return models[0], models[1]


def tokens(*shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, V, shape, generator=torch.Generator().manual_seed(1))


def agree(pairs: list[tuple[Tensor, Tensor]], what: str) -> None:
    error = largest(pairs)
    assert error < 1e-9, f"{what}: {error} on rank {dist.get_rank()}"


def backward(loss: Tensor, exact: Tensor, divided: Any, one: Any) -> list[tuple[Tensor, Tensor]]:
    loss.backward()
    exact.backward()
    return [(loss, exact), *gradients(divided, one)]


def check_cross(rank: int) -> None:
    piece, source = pieces(rank)
    for mechanism in ("linear", "softmax", {"mechanism": "linformer", "rank": 3, "max_length": 32}):
        one, model = twins(LanguageModel, config(mechanism, cross=AttentionConfig(num_heads=2, mechanism=mechanism)))
        divided = context_parallel(model, dist.group.WORLD)
        context = torch.randn(2, S, 8, generator=torch.Generator().manual_seed(2)).double()
        mask = torch.arange(S) < torch.tensor([[S], [6]])
        x = tokens(2, T)
        out = divided(x[:, piece], context=context[:, source], context_mask=mask[:, source])
        pairs = [(out, one(x, context=context, context_mask=mask)[:, piece])]
        loss = divided.loss(x[:, piece], context=context[:, source], context_mask=mask[:, source])
        pairs += backward(loss, one.loss(x, context=context, context_mask=mask), divided, one)
        state = one.new_state(2, context=context, context_mask=mask)
        logits, after = divided.extend(x[:, piece], state)
        expected, end = one.extend(x, state)
        pairs += [(logits, expected[:, piece]), *zip(after.tensors().values(), end.tensors().values(), strict=True)]
        agree([(a[..., : b.shape[2], :], b) if a.ndim == 4 else (a, b) for a, b in pairs], f"cross {mechanism}")


def check_encoder_decoder(rank: int) -> None:
    piece, source = pieces(rank)
    decoder = config(cross=AttentionConfig(num_heads=2))
    one, model = twins(EncoderDecoder, config("performer", causal=False), decoder, tie_embeddings=True)
    divided = context_parallel(model, dist.group.WORLD)
    target, given = tokens(2, T, low=1), tokens(2, S, low=1)
    target[1, 15:] = given[0, 9:] = 0  # pad_token
    loss = divided.loss(target[:, piece], source=given[:, source])
    agree(backward(loss, one(given, target), divided, one), "encoder and decoder")


def check_classifier(rank: int) -> None:
    piece, _ = pieces(rank)
    mask = torch.arange(T) < torch.tensor([[T], [12]])
    for given, part in (({}, {}), ({"key_mask": mask}, {"key_mask": mask[:, piece]})):
        one, model = twins(Classifier, config("decay", causal=False, num_classes=3))
        divided = context_parallel(model, dist.group.WORLD)
        x = tokens(2, T)
        logits, expected = divided(x[:, piece], **part), one(x, **given)
        pairs = backward(logits.square().sum(), expected.square().sum(), divided, one)
        agree([(logits, expected), *pairs], "classifier")
        options: dict[str, Any] = {"causal": False, "num_classes": 3, "vocab_size": None, "input_dim": 5}
        one, model = twins(Classifier, config("decay", pooling="none", **options))
        x = torch.randn(2, T, 5, generator=torch.Generator().manual_seed(2)).double()
        x = x if not given else x.masked_fill(~mask[..., None], float("nan"))
        logits = context_parallel(model, dist.group.WORLD)(x[:, piece], **part)
        agree([(logits, one(x, **given)[:, piece])], "classifier of vectors at each token")


def check_execution(rank: int) -> None:
    piece, _ = pieces(rank)
    for options in (
        {"execution": "recompute"},
        {"residual": "double", "execution": "reverse"},
        {"execution": "recompute_heads"},
    ):
        one, model = twins(LanguageModel, config("linear", depth=2, **options))
        divided = context_parallel(model, dist.group.WORLD)
        x = tokens(2, T)
        agree(backward(divided.loss(x[:, piece]), one.loss(x), divided, one), str(options))


def check_sharded(rank: int) -> None:
    """Weights that FSDP2 shards branch by branch."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    for execution in ("keep", "recompute", "recompute_heads", "reverse"):
        one, model = twins(LanguageModel, config("linear", depth=2, residual="double", execution=execution))
        for branch in model.transformer.stack.branches:
            fully_shard(branch, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")
        loss, exact = model.loss(tokens(2, T)), one.loss(tokens(2, T))
        loss.backward()
        exact.backward()
        grads = zip(model.parameters(), one.parameters(), strict=True)
        agree([(loss, exact), *((x.grad.full_tensor(), y.grad) for x, y in grads)], f"sharded, {execution}")


def check_vectors(rank: int) -> None:
    """A Transformer, learned positions, and a learned table that all ranks reach into."""
    piece, _ = pieces(rank)
    x = torch.randn(2, T, 8, generator=torch.Generator().manual_seed(2)).double()
    one, model = twins(Transformer, config("delta", vocab_size=None))
    out, expected = context_parallel(model, dist.group.WORLD)(x[:, piece]), one(x)[:, piece]
    agree([(out, expected)], "vectors")
    for positions in ("learned", "sinusoidal"):
        one, model = twins(LanguageModel, config(positions=positions, max_length=T))
        divided = context_parallel(model, dist.group.WORLD)
        agree(backward(divided.loss(tokens(2, T)[:, piece]), one.loss(tokens(2, T)), divided, one), positions)


def check_ngrams(rank: int) -> None:
    """N-grams reach over empty pieces, after a state, and not into a packed sequence before."""
    piece, _ = pieces(rank)
    options: dict[str, Any] = {"ngrams": (2, 4), "ngram_buckets": 31, "logit_softcap": 2.0}
    given = config("linear", **options)
    given = replace(given, attention=replace(given.attention, value_embedding=True))
    one, model = twins(LanguageModel, given)
    divided = context_parallel(model, dist.group.WORLD)
    x, packing = tokens(1, T), Packing.from_lengths([3, 14, 6])
    agree(backward(divided.loss(x[:, piece]), one.loss(x), divided, one), "n-grams")
    loss = divided.loss(x[:, piece], packing=packing)
    agree([(loss, one.loss(x, packing=packing))], "packed n-grams")
    mask = torch.arange(T) >= torch.tensor([[0], [12]])  # left-padded
    state = one.extend(tokens(2, 5), one.new_state(2))[1]
    for how, part in (({}, {}), ({"key_mask": mask}, {"key_mask": mask[:, piece]})):
        (out, after), (expected, end) = (
            divided.extend(tokens(2, T)[:, piece], state, **part),
            one.extend(tokens(2, T), state, **how),
        )
        seen = mask[:, piece, None] if how else 1
        pairs = [(out * seen, expected[:, piece] * seen), (after.recent.double(), end.recent.double())]
        agree(pairs, f"n-grams after a state, {list(how)}")


def check_redraw(rank: int) -> None:
    """Random features that are redrawn in training are redrawn alike, whatever the ranks' seeds."""
    _, model = twins(LanguageModel, config({"mechanism": "performer", "redraw_interval": 2}))
    divided = context_parallel(model, dist.group.WORLD).train()
    torch.manual_seed(rank)
    piece, _ = pieces(rank)
    before = model.transformer.stack.attention_layers()[0][1].mechanism.feature_map.projection.clone()
    for _ in range(2):
        loss = divided.loss(tokens(2, T)[:, piece])
    projection = model.transformer.stack.attention_layers()[0][1].mechanism.feature_map.projection
    first = projection.clone()
    dist.broadcast(first, 0)
    assert not torch.equal(projection, before)
    assert torch.equal(projection, first)
    model.eval()
    agree([(loss, model.loss(tokens(2, T)))], "redrawn features")


def check_plugin(rank: int) -> None:
    """Mechanisms registered from outside, by the protocol alone."""
    sys.path.insert(0, str(PLUGIN))
    from longspan_retention import GatedRetention, Retention

    from longspan import register_mechanism

    piece, _ = pieces(rank)
    for mechanism in (Retention, GatedRetention):
        register_mechanism(mechanism.__name__, mechanism)
        for causal in (True, False):
            one, model = twins(LanguageModel, config(mechanism.__name__, causal=causal))
            divided = context_parallel(model, dist.group.WORLD)
            x, packing = tokens(1, T), Packing.from_lengths([3, 14, 6])
            for given in ({}, {"packing": packing}):
                labels = () if causal else (tokens(1, T).flip(1),)
                loss = divided.loss(x[:, piece], *(y[:, piece] for y in labels), **given)
                one.zero_grad()
                model.zero_grad()
                pairs = backward(loss, one.loss(x, *labels, **given), divided, one)
                agree(pairs, f"{mechanism.__name__}, causal {causal}")


def check_transformers(rank: int) -> None:
    from longspan.hf import (
        LongspanConfig,
        LongspanForCausalLM,
        LongspanForMaskedLM,
        LongspanForSeq2SeqLM,
        LongspanForSequenceClassification,
        LongspanForTokenClassification,
        LongspanModel,
    )

    piece, _ = pieces(rank)
    x, mask = tokens(2, T), (torch.arange(T) < torch.tensor([[T], [12]])).long()
    labels = x.masked_fill(mask == 0, -100)
    for kind, causal in ((LongspanForCausalLM, True), (LongspanForMaskedLM, False)):
        one, model = twins(kind, LongspanConfig(config("linear", causal=causal)))
        divided = context_parallel(model, dist.group.WORLD)
        out = divided(x[:, piece], attention_mask=mask[:, piece], labels=labels[:, piece])
        expected = one(x, attention_mask=mask, labels=labels)
        assert type(out) is type(expected)
        real = mask[:, piece, None]
        agree([(out.logits * real, expected.logits[:, piece] * real)], kind.__name__)
        pairs = backward(out.loss, expected.loss, divided, one.model)
        assert largest(pairs) < 1e-6  # transformers rounds logits to float32
        assert divided(x[:, piece]).loss is None
    one, model = twins(LongspanModel, LongspanConfig(config("linear")))
    out = context_parallel(model, dist.group.WORLD)(x[:, piece])
    agree([(out.last_hidden_state, one(x).last_hidden_state[:, piece])], "LongspanModel")
    one, model = twins(LongspanForSequenceClassification, LongspanConfig(config("linear", causal=False), num_labels=3))
    divided = context_parallel(model, dist.group.WORLD)
    out, expected = divided(x[:, piece], labels=torch.tensor([2, 0])), one(x, labels=torch.tensor([2, 0]))
    agree([(out.logits, expected.logits), *backward(out.loss, expected.loss, divided, one.model)], "classification")
    pair = LongspanConfig(config(cross=AttentionConfig(num_heads=2)), encoder=config(causal=False))
    with pytest.raises(ValueError, match="divided as the longspan model in it"):
        context_parallel(LongspanForSeq2SeqLM(pair), dist.group.WORLD)
    with pytest.raises(ValueError, match="divided as the longspan model in it"):
        context_parallel(LongspanForTokenClassification(LongspanConfig(config(causal=False))), dist.group.WORLD)


def check_short(rank: int) -> None:
    """Fewer tokens than ranks, one, and none at all."""
    for mechanism in ("softmax", "linear", "delta", {"mechanism": "local", "window": 3}):
        for causal in (True, False):
            one, model = twins(LanguageModel, config(mechanism, causal=causal, token_shift=(1, 0)))
            divided = context_parallel(model, dist.group.WORLD)
            for cuts in ([0, 1, 1, 2], [0, 0, 0, 1]):
                x, piece = tokens(2, cuts[-1]), slice(*cuts[rank : rank + 2])
                one.zero_grad()
                model.zero_grad()
                out, expected = divided(x[:, piece]), one(x)
                share = (out.square().sum(), expected.square().sum())
                [y.backward() for y in share]
                agree([(out, expected[:, piece]), *gradients(divided, one)], f"{mechanism}, {cuts}")
            assert divided(tokens(2, 0)).shape == (2, 0, V)


def check_refusals(rank: int) -> None:
    divided = context_parallel(LanguageModel(config()), dist.group.WORLD)
    axial = config(legacy=LegacyConfig(axial_stride=2))
    with pytest.raises(ValueError, match="axial attention cannot be divided over ranks"):
        context_parallel(LanguageModel(axial), dist.group.WORLD)
    x = tokens(1, 4)
    with pytest.raises(TypeError, match="state must be what new_state or extend returned, got a int"):
        divided.extend(x, 3)
    with pytest.raises(ValueError, match=r"only a causal Transformer or LanguageModel can be extended"):
        context_parallel(LanguageModel(config(causal=False)), dist.group.WORLD).extend(x, None)
    mask = torch.ones(1, 4, dtype=torch.bool)
    mask[0, 1:3] = False
    with pytest.raises(ValueError, match="one run of True over all ranks"):
        divided(x, key_mask=mask if rank == 1 else None)
    with pytest.raises(ValueError, match="packing and key_mask exclude each other"):
        divided(x, key_mask=mask, packing=Packing.from_lengths([12]))
    match = "key_mask must be bool, True = keep" if rank == 2 else r"key_mask does not fit the pieces of ranks \[2\]"
    with pytest.raises(ValueError, match=match):
        divided(x, key_mask=torch.ones(1, 4) if rank == 2 else None)
    with pytest.raises(ValueError, match="packing must be equal on all ranks, got offsets with checksums"):
        divided(x, packing=Packing.from_lengths([6 + rank, 6 - rank]))
    slots = {"mechanism": "linformer", "rank": 2, "max_length": 16, "keep_slots": True}
    by_slot = context_parallel(LanguageModel(config(slots, causal=False)), dist.group.WORLD)
    with pytest.raises(ValueError, match="keep_slots=True with key_mask cannot be divided over ranks"):
        by_slot(x, key_mask=mask)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r'a mesh of one dimension, such as mesh\["cp"\]'):
        context_parallel(LanguageModel(config()), mesh)
    assert context_parallel(LanguageModel(config()), mesh["cp"])(x).shape == (1, 4, V)
    with pytest.raises(ValueError, match="group must be a process group or a device mesh"):
        context_parallel(LanguageModel(config()), 3)
    pair = EncoderDecoder(config(causal=False), config(cross=AttentionConfig(num_heads=2)))
    both = context_parallel(pair, dist.group.WORLD)
    with pytest.raises(ValueError, match="an EncoderDecoder computes a loss: call loss"):
        both(x)
    with pytest.raises(ValueError, match="an EncoderDecoder needs source="):
        both.loss(x)


CHECKS = {
    check.__name__: check
    for check in (
        check_cross,
        check_encoder_decoder,
        check_classifier,
        check_execution,
        check_sharded,
        check_vectors,
        check_ngrams,
        check_redraw,
        check_plugin,
        check_short,
        check_transformers,
        check_refusals,
    )
}


def check_models(rank: int, ranks: int, names: list[str]) -> None:
    for name in names:
        try:
            CHECKS[name](rank)
        except BaseException as failure:
            raise AssertionError(f"{name} on rank {rank}") from failure


def test_models_equal_one_process() -> None:
    pytest.importorskip("transformers")
    spawn(check_models, 3, list(CHECKS))
