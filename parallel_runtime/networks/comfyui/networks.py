"""ComfyUI's classes of diffusion networks as data: "module:Class" -> what ranks may share out of it.

Names are those of `comfy.ldm`. A class that is not here shares out the batch alone; `tests` compare this table with
ComfyUI's own list of models, so that a new one is known as such.
"""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import Network
from .image_networks import IMAGE
from .shapes_networks import SHAPES
from .sound_networks import SOUND
from .video_networks import VIDEO
from .wan_networks import WAN

NETWORKS: Mapping[str, Network] = {**IMAGE, **VIDEO, **WAN, **SOUND, **SHAPES}


def name_of(network: type) -> str:
    """A class as the table names it."""
    return f"{network.__module__}:{network.__qualname__}"


def find_network(network: type) -> Network | None:
    """The data of a class; None where there is none."""
    return NETWORKS.get(name_of(network))
