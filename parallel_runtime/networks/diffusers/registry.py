"""The transformer families that the engine can run."""

from __future__ import annotations

from ...said import Said, said
from .flux import FLUX
from .flux2 import FLUX2
from .hunyuan_dit import HUNYUAN_DIT
from .pixart import PIXART
from .sd3 import SD3
from .sdxl import SDXL
from .spec import ModelSpec
from .wan import WAN

MODELS: tuple[ModelSpec, ...] = (FLUX, FLUX2, SD3, WAN, HUNYUAN_DIT, PIXART, SDXL)


def supported() -> Said:
    """One clause that lists every supported family, for error messages."""
    names = ", ".join(f"{spec.title} ({spec.transformer_class})" for spec in MODELS)
    return said("Supported are {names}.", names=names)
