"""Makes the client's ComfyUI importable in this process, under the options that it was started with."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError

_LOCK = threading.Lock()  # who finds ComfyUI's options imported finds them set


def use_comfyui(folder: str, options: Mapping[str, Any]) -> None:
    """Make `comfy` importable: call before anything imports it, and after this process has taken its device.

    `options` are values of ComfyUI's command line by the parser's names; those that this one does not have go nowhere.
    ConfigurationError where there is no ComfyUI, or the process has another one already."""
    root = Path(folder)
    if not (root / "comfy" / "sd.py").is_file():
        what = "There is no ComfyUI in {folder} on the host of this worker."
        raise ConfigurationError(what, "Install ComfyUI at the same place on every host.", folder=folder)
    with _LOCK:
        if loaded := sys.modules.get("comfy.cli_args"):
            if loaded.__file__ is None or Path(loaded.__file__).resolve().parent.parent != root.resolve():
                what = "The workers run with the ComfyUI of {file}, and are asked for that of {root}."
                raise ConfigurationError(what, "Restart ComfyUI.", file=loaded.__file__, root=root)
            return
        sys.path.append(str(root))  # at the end: ComfyUI has a module `nodes`, as this pack has a package so called
        code = importlib.import_module("comfy.cli_args")
        for name, value in options.items():
            if name == "fast":
                code.args.fast = {code.PerformanceFeature(each) for each in str(value).split(",") if each}
            elif hasattr(code.args, name):
                setattr(code.args, name, value)
