"""A rank of the link check with a fault, which $DOCTOR_FAULT names and rank 1 has."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from workers.doctor.link_check import main, run_collectives
from workers.launch import PoolSpec
from workers.link_result import Journal, Rates


def check(spec: PoolSpec, rank: int, directory: Path, journal: Journal) -> list[Rates]:
    """`run_collectives`, which rank 1 does not get to."""
    if rank == 1:
        journal.stage("about to fail")
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
    return run_collectives(spec, rank, directory, journal)


if __name__ == "__main__":
    main(check)
