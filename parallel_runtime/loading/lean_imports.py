"""Keeps diffusers from importing what no transformer needs."""

from __future__ import annotations

import diffusers.utils.import_utils as availability

_UNUSED = ("transformers", "scipy", "accelerate", "peft", "torchvision")


def leave_out_unused_packages() -> None:
    """Let diffusers find only what a transformer's forward needs, in this whole process.

    A transformer's module otherwise imports most of transformers, SciPy and more, for texts, schedulers and LoRA files:
    nothing of the pool's. That is 1,000 modules and 1.5 s of a rank's start, more with a cold file cache. Classes that
    are imported already stay as they are.
    """
    for package in _UNUSED:
        if hasattr(availability, flag := f"_{package}_available"):
            setattr(availability, flag, False)
