"""All tiny networks, by name. `comfy` need not be importable here: builders import it."""

from tests.comfyui_networks import (  # noqa: F401 - which register their networks
    tiny_double_stream,
    tiny_ltx,
    tiny_single_stream,
    tiny_sound,
    tiny_video,
    tiny_wan,
)
from tests.comfyui_networks.tiny import TINY, call

__all__ = ["TINY", "call"]
