"""One sequence over several processes: `context_parallel`, on torch.distributed with any backend."""

from .context import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
