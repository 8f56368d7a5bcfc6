"""Memory that PyTorch keeps for cuBLAS."""

from __future__ import annotations

import torch


def clear_workspaces() -> None:
    """Let it go, where this torch can. No recording that was made with it may be replayed any more."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
