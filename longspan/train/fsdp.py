"""Models sharded by FSDP, as configured by accelerate: gather weights and optimizer state for a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from longspan.models.transformer import Classifier, LanguageModel
from longspan.train.objectives import Objective

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def uses_fsdp(accelerator: Accelerator) -> bool:
    """Return whether FSDP is enabled.

    Raises:
        ValueError: FSDP is version 1, which replaces modules by wrappers.
    """
    sharded = bool(accelerator.distributed_type == DistributedType.FSDP)
    if sharded and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP version {accelerator.state.fsdp_plugin.fsdp_version} is not supported: "
            "set fsdp_version: 2 in the configuration of accelerate"
        )
    return sharded


def register_methods(wrapped: Any) -> None:
    """Let the methods of the objective and its branches other than `forward` gather the weights that they use."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in ("losses", "correct"):
        if hasattr(wrapped, name):
            register_fsdp_forward_method(wrapped, name)


def is_sharded(x: Tensor) -> bool:
    """Return whether a tensor is divided among processes."""
    return isinstance(x, DTensor)


def local_part(x: Tensor) -> Tensor:
    """Return the shard of a tensor in this process; a tensor that is not sharded as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def gather_model(objective: Objective) -> LanguageModel | Classifier:
    """Return the model with all weights in the main process. Every process must call this."""
    state = get_model_state_dict(objective, options=_FULL)
    with torch.random.fork_rng(devices=[]):
        model = type(objective.model)(objective.model.config)
    if state:
        model.load_state_dict({name.removeprefix("model."): x for name, x in state.items()})
    return model


def gather_optimizer(objective: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state by parameter name in the main process. Every process must call this."""
    return dict(get_optimizer_state_dict(objective, optimizer, options=_FULL))


def load_optimizer(objective: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state that `gather_optimizer` or the optimizer itself returned; each process keeps its shard."""
    names = {id(p): name for name, p in objective.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    if state["param_groups"] and any(isinstance(p, int) for p in state["param_groups"][0]["params"]):
        groups = [{**group, "params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
        state = {"state": {order[i]: x for i, x in state["state"].items()}, "param_groups": groups}
    set_optimizer_state_dict(objective, optimizer, state, options=StateDictOptions(full_state_dict=True))
