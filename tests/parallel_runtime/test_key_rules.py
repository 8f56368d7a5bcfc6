"""The checked-in key rules against diffusers: its converters, run on marked tensors, and its classes' parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from docs.derive_key_rules import CONVERTERS, FOLDER, derive, sources_of
from parallel_runtime.networks.diffusers.registry import MODELS
from parallel_runtime.networks.diffusers.sdxl import SDXL
from tests import tiny_flux, tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_sdxl, tiny_wan
from tests.parallel_runtime.model_forward import rules_of
from tests.tiny_model import find_by_name

CONFIGS: dict[str, dict[str, Any]] = {
    "flux": tiny_flux.tiny_config(),
    "flux2": tiny_flux2.tiny_config(),
    "sd3": tiny_sd3.tiny_config(layers=3),
    "wan": tiny_wan.image_config(pos_embed_seq_len=514),
    "pixart": tiny_pixart.tiny_config(use_additional_conditions=True),
    "hunyuan_dit": tiny_hunyuan_dit.tiny_config(use_style_cond_and_image_meta_size=True),
    "sdxl": tiny_sdxl.tiny_config(),
}


def _parameters(family: str) -> dict[str, torch.Tensor]:
    import diffusers

    with torch.device("meta"):
        transformer: Any = getattr(diffusers, find_by_name(family).transformer_class)(**CONFIGS[family])
    return transformer.state_dict()


@pytest.mark.parametrize("family", CONVERTERS)
def test_the_converter_of_the_installed_diffusers_gives_the_rules_that_are_checked_in(family):
    written = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    by_hand = written.pop("by_hand")
    assert derive(family, sources_of(written)) == written
    # What the converter leaves as it is needs a rule by hand; once it does not, this says so.
    assert all(derive(family, [source])["whole"] == {source: source} for source in by_hand)


def test_the_converter_of_the_installed_diffusers_puts_a_u_nets_tensors_where_our_rules_do():
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    config = CONFIGS["sdxl"]
    rules = rules_of(SDXL, _parameters("sdxl"))
    marked = {f"model.diffusion_model.{rule.source}": torch.tensor(n) for n, rule in enumerate(rules.values())}
    converted = convert_ldm_unet_checkpoint(marked, config)
    assert {name: int(tensor) for name, tensor in converted.items()} == {name: n for n, name in enumerate(rules)}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_parameter_has_one_rule(family):
    parameters = _parameters(family)
    assert rules_of(find_by_name(family), parameters).keys() == parameters.keys()


def test_the_families_here_are_all_that_there_are():
    assert set(CONFIGS) == {spec.name for spec in MODELS} == {path.stem for path in FOLDER.glob("*.json")}
