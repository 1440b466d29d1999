"""Run by torchrun: a transformers model of longspan's under FSDP, its losses printed; `--alone` without it."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from longspan import AttentionConfig, ModelConfig
from longspan.hf import LongspanConfig, LongspanForCausalLM
from longspan.models.residual import ResidualBranch

alone = "--alone" in sys.argv
torch.manual_seed(0)
attention = AttentionConfig(num_heads=4, mechanism="linear")
config = ModelConfig(dim=32, depth=2, causal=True, vocab_size=256, attention=attention)
model = LongspanForCausalLM(LongspanConfig(config))
data = torch.randint(0, 256, (5, 4, 24))
rank, world = 0, 1
if not alone:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,))
    for module in model.modules():
        if isinstance(module, ResidualBranch):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for batch in data:
    mine = batch.chunk(world)[rank]
    loss = model(mine, labels=mine).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    if not alone:
        dist.all_reduce(whole)
    if rank == 0:
        print(f"{whole.item() / world:.6f}", flush=True)
if not alone:
    sharded = sum(p.to_local().numel() for p in model.parameters())
    assert sharded < 0.6 * sum(p.numel() for p in model.parameters())
    dist.destroy_process_group()
os._exit(0)
