"""xDiT's state, which lives in its modules: the engine's configuration of one case."""

from __future__ import annotations

from typing import Any

from .task import Task


def configure(task: Task, **degrees: int) -> Any:
    """Join xDiT's groups and return its EngineConfig.

    Args:
        degrees: arguments of xFuserArgs.
    """
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment

    init_distributed_environment(rank=task.rank, world_size=task.case.ranks, local_rank=task.rank)
    attention = "sdpa" if task.case.tiny else None
    engine_config, _ = xFuserArgs(attention_backend=attention, **degrees).create_config()
    # By default float16: a stage then receives bfloat16 into float16, fails, and leaves the others waiting for ever.
    engine_config.runtime_config.dtype = task.dtype
    return engine_config
