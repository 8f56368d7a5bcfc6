"""Which class of network each of ComfyUI's models has, read from its own source."""

from __future__ import annotations

import inspect
import re
from typing import Any

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.tables.comfyui import NETWORKS


def inventory(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """What there is, here and in our table.

    Returns:
        "networks": supported model -> "module:Class"; "gone": entries that this ComfyUI has not, but for those that
        were only read.
    """
    use_comfyui(comfyui, {"cpu": True})
    import comfy.model_base
    import comfy.supported_models

    networks = {}
    for config in comfy.supported_models.models:
        for name in re.findall(r"model_base\.(\w+)\(", inspect.getsource(config.get_model)):
            network = _network_of(getattr(comfy.model_base, name), vars(comfy.model_base))
            networks[f"{config.__name__} ({name})"] = f"{network.__module__}:{network.__qualname__}"
    gone = [name for name, data in NETWORKS.items() if not data.read and not _exists(name)]
    return {"networks": networks, "gone": gone}


def _network_of(model: type, names: dict[str, Any]) -> type:
    """What the nearest constructor gives or has as `unet_model`."""
    for base in model.__mro__:
        if "__init__" in vars(base):
            for given in re.findall(r"unet_model=([\w.]+)", inspect.getsource(base.__init__)):
                if given != "unet_model":
                    first, *rest = given.split(".")
                    network = names[first]
                    for each in rest:
                        network = getattr(network, each)
                    return network
    raise AssertionError(f"{model.__name__} gives no unet_model")


def _exists(name: str) -> bool:
    module, _, qualname = name.partition(":")
    try:
        return hasattr(__import__(module, fromlist=["_"]), qualname)
    except ImportError:
        return False
