"""FSDP2 and context parallelism in a loop of your own: every sequence is divided over the ranks of a cp group.

    torchrun --nproc-per-node 4 examples/context_parallel.py

Four processes on the CPU here (gloo); with GPUs the same on "cuda" (NCCL).
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.distributed import ContextParallel, context_parallel
from longspan.models.residual import ResidualBranch

CONTEXT, BATCH, STEPS, RATE = 96, 4, 5, 0.5


def build() -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=4, mechanism="delta", conv_size=4)
    return LanguageModel(ModelConfig(dim=32, depth=2, causal=True, vocab_size=256, attention=attention))


def divide(model: LanguageModel, mesh: DeviceMesh) -> ContextParallel:
    """Divide sequences over mesh["cp"] and weights over all ranks."""
    divided: ContextParallel = context_parallel(model, mesh["cp"])  # before the weights are sharded
    shards = mesh["dp", "cp"]._flatten("dp_cp")
    for module in model.modules():
        if isinstance(module, ResidualBranch):
            fully_shard(module, mesh=shards)
    fully_shard(divided, mesh=shards)
    register_fsdp_forward_method(divided, "loss")  # FSDP gathers the weights for forward, and for this
    return divided


def train(mesh: DeviceMesh) -> list[float]:
    model = divide(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    dp, cp = mesh["dp"], mesh["cp"]
    losses = []
    for batch in torch.randint(256, (STEPS, BATCH, CONTEXT), generator=torch.Generator().manual_seed(1)):
        rows = batch.chunk(dp.size())[dp.get_local_rank()]
        piece = rows.tensor_split(cp.size(), dim=1)[cp.get_local_rank()]  # pieces may have different lengths
        loss = model.loss(piece)  # the mean over the tokens of all ranks of the cp group
        # Each rank has the gradient of its piece: they add up over cp, while FSDP takes the mean over all ranks.
        (loss * cp.size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=dp.get_group())
        losses.append(mean.item() / dp.size())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = train(init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp")))
    if dist.get_rank() == 0:
        print(" ".join(f"{loss:.6f}" for loss in found))
    dist.destroy_process_group()
