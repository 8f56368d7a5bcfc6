"""What torch sees: `python -m workers.doctor.probe`, JSON on its output, and its GPU memory back."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import Any

from ..processes import die_with_parent


def ask_torch() -> dict[str, Any]:
    """Versions, each GPU's (UUID, name) as CUDA counts, and pairs that reach each other's memory."""
    import torch

    facts: dict[str, Any] = {"cuda": torch.version.cuda}
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return facts | {"gpu_problem": str(complaints[0].message).splitlines()[0].rstrip(".") if complaints else None}
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    reach = torch.cuda.can_device_access_peer
    pairs = [(one, other) for other in range(len(gpus)) for one in range(other)]
    facts["gpus"] = [(str(gpu.uuid), gpu.name) for gpu in gpus]
    facts["reach"] = [pair for pair in pairs if reach(*pair) and reach(*pair[::-1])]
    return facts


if __name__ == "__main__":
    die_with_parent(os.getppid())
    with contextlib.redirect_stdout(sys.stderr):  # whatever packages print while they are imported
        found = ask_torch()
    print(json.dumps(found))
