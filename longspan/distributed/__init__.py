"""Models over several processes: context parallelism, which divides the sequence."""

from longspan.distributed.context_parallel import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
