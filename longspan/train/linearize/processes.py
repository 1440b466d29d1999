"""Several processes: the sequences of a step are divided among them, and the layers' weights sharded by FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from longspan.distributed.mesh import Mesh, MeshShape
from longspan.train import setup
from longspan.train.fsdp import is_sharded, local_part, uses_fsdp
from longspan.train.linearize.stages import model_layers
from longspan.utils import choose_device

T = TypeVar("T")


class Processes:
    """The processes that torchrun or `accelerate launch` started; without them, this one alone.

    Args:
        device: As --device.

    Attributes:
        number: How many there are.
        rank: Which one this is.
        device: The device of this one.
    """

    number, rank = 1, 0

    def __init__(self, device: str | None) -> None:
        self._accelerator: Accelerator | None = None
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            self.device = choose_device(device)
            return
        accelerator = self._accelerator = setup.make_accelerator(device or "auto", "fp32")
        if uses_fsdp(accelerator):
            raise ValueError("longspan linearize shards by itself: start it by torchrun, or without FSDP of accelerate")
        self.number, self.rank, self.device = accelerator.num_processes, accelerator.process_index, accelerator.device
        self._mesh = Mesh.create(MeshShape(fsdp=self.number), self.device)

    @property
    def main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def check_equal(self, values: Mapping[str, Any], what: str) -> None:
        """Raise a ValueError in every process if these values are not the same in all of them."""
        if self._accelerator is not None:
            setup.check_equal(self._accelerator, values, what)

    def in_every(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. If it fails in one process, it fails in all."""
        return work() if self._accelerator is None else setup.in_every_process(self._accelerator, work)

    def main_first(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. The others wait for the main process, and fail if it fails."""
        return work() if self._accelerator is None else setup.main_process_first(self._accelerator, work)

    def largest(self, *values: float) -> list[float]:
        """Return the largest of each value over all processes."""
        if self.number == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over all processes."""
        if self.number == 1:
            return x
        x = x / self.number
        dist.all_reduce(x)
        return x

    def part(self, x: Tensor) -> Tensor:
        """Return the rows of a batch that this process reads."""
        return x.chunk(self.number)[self.rank]

    def shard_layers(self, model: Any) -> None:
        """Shard the weights of each layer; embeddings and the output layer stay whole in every process."""
        from torch.distributed.fsdp import fully_shard

        for layer in model_layers(model):
            fully_shard(layer, mesh=self._mesh.weights)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average gradients over all processes; FSDP has done so for sharded parameters."""
        if self.number > 1:
            for parameter in parameters:
                if parameter.grad is not None and not is_sharded(parameter.grad):
                    parameter.grad = self.mean(parameter.grad)

    def clip_gradients(self, parameters: Sequence[nn.Parameter], largest: float) -> None:
        """Scale gradients down so that their norm over all parameters is at most `largest`."""
        if self.number == 1:
            torch.nn.utils.clip_grad_norm_(parameters, largest)
            return
        squares = torch.zeros(2, device=self.device)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            squares[int(is_sharded(gradient))] += local_part(gradient).float().square().sum()
        dist.all_reduce(squares[1:])
        scale = (largest / (squares.sum().sqrt() + 1e-6)).clamp(max=1)
        for gradient in gradients:
            local_part(gradient).mul_(scale)

    def end(self) -> None:
        """Wait for all processes, and end their group."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()
            self._accelerator.end_training()


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model on the CPU, tied ones once. Every process must call this."""
    found, seen = {}, set()
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) not in seen:
            seen.add(id(x))
            whole = x.full_tensor() if is_sharded(x) else x
            found[name] = whole.detach().cpu().contiguous()
    return found
