"""Models whose weights are divided among processes (FSDP, by accelerate's own configuration): saved and read whole."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from longspan.models.transformer import Classifier, LanguageModel
from longspan.train.objectives import Objective
from longspan.train.presets import Values

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the processes hold parts of the weights."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def check_sharding(accelerator: Accelerator) -> None:
    """Refuses the older kind, which wraps models in place of changing them."""
    if is_sharded(accelerator) and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP version {accelerator.state.fsdp_plugin.fsdp_version} is not supported: "
            "set fsdp_version: 2 in accelerate's configuration"
        )


def open_methods(wrapped: Any) -> None:
    """Lets methods beside forward gather the weights they need."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in ("losses", "correct"):
        if hasattr(wrapped, name):
            register_fsdp_forward_method(wrapped, name)


def whole_model(objective: Objective) -> LanguageModel | Classifier:
    """A model with all the weights, in the first process; every process must ask for it."""
    state = get_model_state_dict(objective, options=_WHOLE)
    model = type(objective.model)(objective.model.config)
    if state:
        model.load_state_dict({name.removeprefix("model."): x for name, x in state.items()})
    return model


def optimizer_values(objective: Objective, optimizer: torch.optim.Optimizer) -> Values:
    """The optimizer's state by parameter name, in the first process; every process must ask for it."""
    return dict(get_optimizer_state_dict(objective, optimizer, options=_WHOLE))


def load_optimizer(objective: Objective, optimizer: torch.optim.Optimizer, values: Values) -> None:
    """What `optimizer_values` gave, each process its part."""
    set_optimizer_state_dict(objective, optimizer, values, options=StateDictOptions(full_state_dict=True))
