"""SD3's model file: beside the tables of all families, shapes, layouts, tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.sd3 import SD3
from tests.family_calls import sd3_call
from tests.family_files import FILES
from tests.parallel_runtime.model_forward import apply_rules, comfyui_call, rules_of
from tests.tiny_model import make_state_dict, to_original, write_diffusers_folder

KINDS = FILES["SD3"].configs


def test_weight_rules_agree_with_the_converter_of_diffusers():
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    config = KINDS["sd3.5 medium"]
    state_dict = make_state_dict(SD3, config)
    original = to_original(SD3, state_dict, config)
    # The converter looks only for the widths of the published models.
    widened = {**original, "context_embedder.weight": torch.randn(1536, 64)}
    expected = convert_sd3_transformer_checkpoint_to_diffusers(dict(widened))
    made = apply_rules(rules_of(SD3, state_dict), widened)
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


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
