"""The engine on a GPU: captured steps, several prompts at a time, the same bits whatever else runs."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serve_cases import MECHANISMS, answers, language_model

from longspan import Sampling
from longspan.serve import Engine, Request

SAMPLINGS = [Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_p=0.9), Sampling(top_k=11, min_p=0.01)]


def requests(number, seed):
    rng = random.Random(seed)
    for _ in range(number):
        prompt = list(range(rng.choice([0, 16, 32, 40]))) + [rng.randrange(256) for _ in range(rng.choice([1, 7, 23]))]
        sampling, seeds = rng.choice(SAMPLINGS), rng.randrange(1 << 32)
        yield Request(prompt, rng.randrange(1, 30), sampling=sampling, seed=seeds, logprobs=rng.choice([None, 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_batch_invariance_on_a_gpu(name, dtype):
    model = language_model(MECHANISMS[name], dtype=dtype).cuda()
    given = list(requests(60, 5))
    options = {"slots": 13, "chunk": 16, "max_length": 97}
    with Engine(model, max_queue=100, **options) as engine, ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda request: answers(engine.submit(request).result()), given))
        assert engine.stats().cache.hits > 5
        assert engine._loop._graph is not None or name == "blind spot"
    with Engine(model, cache_bytes=0, **options) as engine:
        for request, found in zip(given, together, strict=True):
            assert answers(engine.submit(request).result()) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_many_prompts_wait(dtype):
    model, rng = language_model(dtype=dtype).cuda(), random.Random(7)
    given = [Request([rng.randrange(256) for _ in range(rng.randrange(65, 400))], 3, logprobs=1) for _ in range(97)]
    with Engine(model, slots=37, chunk=128, max_queue=100) as engine:
        streams = [engine.submit(request) for request in given]
        together = [answers(stream.result()) for stream in streams]
        numbers = {size: [len(call.inputs[0]) for call in calls] for size, calls in engine._reader._graphs.items()}
    assert numbers[128] in ([8, 32], [8, 16], [16])
    with Engine(model, slots=37, chunk=128, cache_bytes=0) as engine:
        assert [answers(engine.submit(request).result()) for request in given] == together


def test_sessions_on_a_gpu():
    model = language_model().cuda()
    greedy = Sampling(temperature=0)
    with Engine(model, slots=3) as engine:
        whole = engine.submit(Request(b"a story", 30, sampling=greedy)).result()[0].tokens
        for size in (1, 3, 4, 9):
            first = engine.submit(Request(b"a story", size, sampling=greedy, keep_state=True)).result()[0]
            rest = Request(b"", 30 - size, sampling=greedy, previous_state=first.session)
            assert first.tokens + engine.submit(rest).result()[0].tokens == whole
