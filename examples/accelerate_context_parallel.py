"""Context parallelism with accelerate's configuration: its mesh, and on GPUs its FSDP2.

    torchrun --nproc-per-node 4 examples/accelerate_context_parallel.py

`accelerate launch` sets the same by `parallelism_config_cp_size: 2`, `parallelism_config_dp_shard_size: 2` and
`fsdp_version: 2` in its configuration. accelerate's own context parallelism (`maybe_context_parallel`) divides softmax
attention only, and is not used.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.distributed import context_parallel

CONTEXT, BATCH, STEPS, RATE = 96, 4, 5, 0.5


def build() -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=4, mechanism="delta", conv_size=4)
    return LanguageModel(ModelConfig(dim=32, depth=2, causal=True, vocab_size=256, attention=attention))


def prepare(config: ParallelismConfig) -> tuple[Accelerator, Any, Any, Any]:
    """Return the accelerator, its mesh, the divided and sharded model, and the optimizer."""
    if torch.cuda.is_available():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["ResidualBranch"]
        )
        accelerator = Accelerator(parallelism_config=config, fsdp_plugin=plugin)
        mesh = accelerator.torch_device_mesh
        divided = context_parallel(build().to(accelerator.device), mesh["cp"])  # before the weights are sharded
        divided, optimizer = accelerator.prepare(divided, torch.optim.SGD(divided.parameters(), lr=RATE))
    else:  # accelerate has neither FSDP nor a mesh of its own on the CPU
        accelerator = Accelerator(cpu=True)
        mesh = config.build_device_mesh("cpu")
        divided = context_parallel(build(), mesh["cp"])
        fully_shard(divided, mesh=mesh["dp_shard_cp"])
        optimizer = accelerator.prepare(torch.optim.SGD(divided.parameters(), lr=RATE))
    register_fsdp_forward_method(divided, "loss")  # FSDP gathers the weights for forward, and for this
    return accelerator, mesh, divided, optimizer


def train(ranks: int) -> list[float]:
    accelerator, mesh, divided, optimizer = prepare(ParallelismConfig(dp_shard_size=ranks // 2, cp_size=2))
    dp, cp = mesh["dp_shard"], mesh["cp"]
    losses = []
    for batch in torch.randint(256, (STEPS, BATCH, CONTEXT), generator=torch.Generator().manual_seed(1)):
        rows = batch.to(accelerator.device).chunk(dp.size())[dp.get_local_rank()]
        loss = divided.loss(rows.tensor_split(cp.size(), dim=1)[cp.get_local_rank()])
        # Each rank has the gradient of its piece: they add up over cp, while FSDP takes the mean over all ranks.
        accelerator.backward(loss * cp.size())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=dp.get_group())
        losses.append(mean.item() / dp.size())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    found = train(dist.get_world_size())
    if dist.get_rank() == 0:
        print(" ".join(f"{loss:.6f}" for loss in found))
    dist.destroy_process_group()
