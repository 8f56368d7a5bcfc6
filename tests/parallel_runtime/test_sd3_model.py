"""SD3's model file: beside the tables of all families, layouts of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.sd3 import SD3
from tests.family_calls import sd3_call
from tests.family_files import FILES
from tests.parallel_runtime.model_forward import comfyui_call
from tests.tiny_model import write_diffusers_folder

KINDS = FILES["SD3"].configs


def _old_folder(path: Path, config: dict[str, Any]) -> Path:
    """As SD3 medium was published: before the config had entries for SD3.5."""
    folder = write_diffusers_folder(SD3, path, config)
    written = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in written.items() if key not in ("dual_attention_layers", "qk_norm")}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_every_layout_of_the_same_weights_gives_the_same_output(tmp_path):
    config, call = KINDS["sd3"], sd3_call(3, (7, 10), 2)
    expected = comfyui_call(write_diffusers_folder(SD3, tmp_path / "plain", config), call)
    layouts = [
        write_diffusers_folder(SD3, tmp_path / "pipeline", config, shards=2, pipeline="StableDiffusion3Pipeline"),
        _old_folder(tmp_path / "old", config),
    ]
    for path in layouts:
        assert open_checkpoint(path).spec is SD3
        assert torch.equal(comfyui_call(path, call), expected), path
