"""The ranks of a run by axis: copies of the weights (dp), shards of the weights (fsdp), pieces of the sequence (cp)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.models.residual import ResidualBranch


@dataclass(frozen=True)
class MeshShape:
    """The number of ranks along each axis, from the outermost to the innermost; −1: all that are left.

    Attributes:
        dp: Ranks that read different sequences and hold copies of the weights.
        fsdp: Ranks that read different sequences and hold shards of the weights (FSDP2).
        cp: Ranks that hold pieces of the same sequences (context parallelism), and shards of the weights.
    """

    dp: int = 1
    fsdp: int = 1
    cp: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Return the shape that a text such as ``dp=2,cp=4`` describes; axes that are left out have one rank.

        Raises:
            ValueError: The text names another axis, an axis twice, or a size that is not allowed.
        """
        names = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if name not in names or name in sizes:
                problem = "is given twice" if name in sizes else "is no axis"
                raise ValueError(f"--mesh {text}: {name!r} {problem}; axes are {', '.join(names)}, as in dp=2,cp=4")
            if not size.removeprefix("-").isdecimal() or int(size) == 0 or int(size) < -1:
                raise ValueError(f"--mesh {text}: {name} must be a positive integer, or -1 for the rest, got {size!r}")
            sizes[name] = int(size)
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(f"--mesh {text}: only one axis can be -1, all ranks that are left")
        return cls(**sizes)

    def fit(self, ranks: int) -> MeshShape:
        """Return the shape for a number of ranks, with -1 replaced.

        Raises:
            ValueError: The shape has another number of ranks.
        """
        sizes = vars(self)
        known = math.prod(size for size in sizes.values() if size > 0)
        fitted = replace(self, **{name: ranks // known for name, size in sizes.items() if size == -1})
        if fitted.ranks != ranks:
            needed = f"a multiple of {known}" if -1 in sizes.values() else str(known)
            raise ValueError(
                f"--mesh {self} needs {needed} processes, and there {'is' if ranks == 1 else 'are'} {ranks}: start it "
                f"with torchrun and as many (nodes × --nproc-per-node), or change --mesh"
            )
        return fitted

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.fsdp * self.cp

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or of groups of cp ranks, that read different sequences."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in vars(self).items() if size != 1) or "dp=1"


@dataclass(frozen=True)
class Mesh:
    """The process groups of a mesh.

    Attributes:
        shape: The sizes of the axes.
        weights: Two dimensions: copies (dp) × shards (fsdp · cp) of the weights.
        cp: This rank's group of context parallelism.
        data_rank: Which sequences this rank reads, from 0 to `shape.data_ranks` − 1.
    """

    shape: MeshShape
    weights: DeviceMesh
    cp: dist.ProcessGroup
    data_rank: int

    @classmethod
    def create(cls, shape: MeshShape, device: torch.device) -> Mesh:
        """Create the process groups; every rank must call this."""
        shards = (shape.dp, shape.fsdp * shape.cp)
        weights = init_device_mesh(device.type, shards, mesh_dim_names=("dp", "shard"))
        data = init_device_mesh(device.type, (shape.data_ranks, shape.cp), mesh_dim_names=("data", "cp"))
        return cls(shape, weights, data.get_group("cp"), data.get_local_rank("data"))


def shard_weights(module: nn.Module, mesh: Mesh) -> None:
    """Shard a module's weights by FSDP2 (HSDP if dp > 1), one group for each residual branch and one for the rest.

    Gradients are averaged over all ranks of the mesh. `extend` of the branches gathers weights as `forward` does.

    Args:
        module: The module, on the device of the mesh. It is changed in place.
        mesh: The mesh.

    Raises:
        ValueError: A parameter is a scalar, which FSDP does not shard.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ValueError(
                f"FSDP does not shard scalars such as {name}: train hyper-connections, ReZero and ScaleNorm without "
                "--mesh, in any number of processes, or use other residual, norm_position and norm"
            )
    for branch in module.modules():
        if isinstance(branch, ResidualBranch):
            fully_shard(branch, mesh=mesh.weights)
            register_fsdp_forward_method(branch, "extend")
    fully_shard(module, mesh=mesh.weights)
