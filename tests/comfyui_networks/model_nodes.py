"""Which nodes of a ComfyUI take a MODEL. Run by a test, in a process of its own: python model_nodes.py COMFYUI."""

from __future__ import annotations

import asyncio
import json
import sys


def takers() -> list[str]:
    """Types of nodes with an input of the type MODEL."""
    import nodes

    found = []
    for name, node in nodes.NODE_CLASS_MAPPINGS.items():
        inputs = node.INPUT_TYPES()
        kinds = [given[0] for group in inputs.values() if isinstance(group, dict) for given in group.values()]
        if any(isinstance(kind, str) and "MODEL" in kind.split(",") for kind in kinds):
            found.append(name)
    return found


if __name__ == "__main__":
    comfyui = sys.argv.pop(1)
    sys.path.insert(0, comfyui)
    sys.argv.append("--cpu")
    import comfy.options

    comfy.options.enable_args_parsing()
    import nodes

    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    print(json.dumps(takers()))
