"""A process that imports as an idle rank does, then patches weights: python idle_imports_run.py COMFYUI SETS.

Prints how many modules were imported while it was idle, and the names of those that patching imported after that.
"""

from __future__ import annotations

import pickle
import sys

import torch

from parallel_runtime.requests.comfyui_code import ComfyuiCode
from workers.rank.inbox import import_ahead


def main(comfyui: str, path: str) -> None:
    from torch import nn

    from parallel_runtime.patching import comfyui_patches, patch_data

    torch.set_grad_enabled(False)
    with open(path, "rb") as file:
        sets = pickle.load(file)  # it imports, too
    before = set(sys.modules)
    assert all(import_ahead(torch.device("cpu"), ComfyuiCode(comfyui)))
    idle = set(sys.modules)
    for given in sets:
        computing = comfyui_patches.Computing(torch.device("cpu"), given, patch_data.UNPATCHED.hooks)
        for name in given.weights:
            size = (32, 16) if name.endswith("weight") else (32,)
            base = torch.ones(size)
            assert not torch.equal(computing.weight(name, base, nn.Linear(1, 1)), base)
        for layer in given.bypass:
            computing.folded(f"{layer}.weight", torch.ones(32, 16), layer, 16)
    print(len(idle - before))
    print(*sorted(set(sys.modules) - idle))


if __name__ == "__main__":
    main(*sys.argv[1:])
