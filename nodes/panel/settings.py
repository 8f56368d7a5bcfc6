"""What the artist set in ComfyUI's settings of this pack, and ComfyUI's language. The file may hold anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import said, together

START_DEVICES = "ParallelDiT.StartDevices"
DEFAULT_DEVICES = "ParallelDiT.DefaultDevices"
LOCALE = "Comfy.Locale"
LANGUAGES = ("en", "zh", "ja")


def settings_file() -> Path:
    """Where ComfyUI keeps the default user's settings."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"


def read_settings() -> Mapping[str, Any]:
    """All settings of the default user; none where none were saved, or they cannot be read."""
    try:
        settings = json.loads(settings_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def default_config(settings: Mapping[str, Any]) -> ParallelConfig:
    """What a loader without a Parallel Config takes; ConfigurationError for a setting that cannot hold."""
    devices = settings.get(DEFAULT_DEVICES) or "auto"
    try:
        return ParallelConfig(devices=devices.strip() if isinstance(devices, str) else devices)
    except ConfigurationError as error:
        where = said("It is the default in Settings, Parallel DiT.")
        raise ConfigurationError(together((error.cause, where)), error.fix) from error


def wished_config(parallel_config: Mapping[str, Any] | None) -> ParallelConfig:
    """That of a node's socket, else the default; ConfigurationError for one that cannot hold."""
    if parallel_config is None:
        return default_config(read_settings())
    return ParallelConfig.from_mapping(parallel_config)


def language_of(settings: Mapping[str, Any]) -> str:
    """The language of the canvas, as far as this pack has it."""
    wished = str(settings.get(LOCALE, "")).partition("-")[0]
    return wished if wished in LANGUAGES else "en"
