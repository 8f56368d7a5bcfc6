"""A rank of the link check with a fault, which $DOCTOR_FAULT names and rank 1 has."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from workers.doctor.link_rank import Tell, exchange, main
from workers.launch import PoolSpec


def check(spec: PoolSpec, rank: int, directory: Path, tell: Tell) -> dict[str, Any]:
    """`exchange`, which rank 1 does not get to."""
    if rank == 1:
        tell(stage="about to fail")
        fault = os.environ["DOCTOR_FAULT"]
        if fault == "raise":
            raise RuntimeError("NCCL error: unhandled system error\nLast error:\nno such interface")
        if fault == "exit":
            os._exit(7)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    return exchange(spec, rank, directory, tell)


if __name__ == "__main__":
    main(check)
