"""Makes GPUs as small as others are: a process that holds the rest of their memory until its standard input ends.

    python -m benchmarks.in_comfyui.ballast 24 0,1    # leaves 24 GiB of GPUs 0 and 1 to everybody else together

An allocator's limit (`torch.cuda.set_per_process_memory_fraction`) would not do: weights lie in memory of the driver's
own calls, which it does not count. What this holds is gone for ComfyUI, for the ranks and for the driver alike.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_READY = "held"
_PIECE = 256 << 20


@contextmanager
def gpus_of(gib: float, devices: str, python: str = sys.executable) -> Iterator[None]:
    """Inside, the devices have so much memory; 0 leaves them as they are.

    Raises:
        RuntimeError: somebody else holds what should go.
    """
    if not gib:
        yield
        return
    command = [python, "-m", "benchmarks.in_comfyui.ballast", str(gib), devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != _READY:
                raise RuntimeError(f"Not so much memory is free on {devices} that {gib} GiB would be left.")
            yield
        finally:
            process.stdin.close()


def _hold(gib: float, index: int) -> list[object]:
    import torch

    device = torch.device("cuda", index)
    held: list[object] = [torch.empty(1, device=device)]
    free, total = torch.cuda.mem_get_info(device)
    wanted = total - int(gib * 2**30) - (total - free if total - free < 2**30 else 0)  # its own context counts
    held += [torch.empty(_PIECE, dtype=torch.uint8, device=device) for _ in range(max(0, wanted) // _PIECE)]
    return held


def main() -> None:
    """Hold, say so, and wait."""
    gib, devices = float(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")]
    held = [_hold(gib, index) for index in devices]
    print(_READY, flush=True)
    sys.stdin.read()
    del held


if __name__ == "__main__":
    main()
