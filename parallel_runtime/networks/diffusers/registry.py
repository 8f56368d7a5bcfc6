"""The transformer families that the engine can run."""

from __future__ import annotations

from .flux import FLUX
from .flux2 import FLUX2
from .hunyuan_dit import HUNYUAN_DIT
from .pixart import PIXART
from .sd3 import SD3
from .sdxl import SDXL
from .spec import ModelSpec
from .wan import WAN

MODELS: tuple[ModelSpec, ...] = (FLUX, FLUX2, SD3, WAN, HUNYUAN_DIT, PIXART, SDXL)
