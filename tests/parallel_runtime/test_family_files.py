"""Every family's files: the config from the shapes, relatives refused, the same weights from every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.load_transformer import load_transformer
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.headers import original_header
from parallel_runtime.networks.diffusers.registry import MODELS
from parallel_runtime.networks.diffusers.spec import TensorInfo
from tests.family_files import FILES, FamilyFiles, Relative, header
from tests.parallel_runtime.model_forward import CPU
from tests.tiny_model import make_state_dict, write_diffusers_file, write_diffusers_folder, write_original

CONFIGS = [(family, kind) for family, files in FILES.items() for kind in files.configs]
RELATIVES = [(family, relative) for family, files in FILES.items() for relative in files.relatives]
PREFIX = "model.diffusion_model."
SMALLEST = {"PixArt": "alpha, one layer", "HunyuanDiT": "1.1", "SDXL": "KOALA", "Wan": "one head"}
"""Which config is loaded. Tests of FLUX.1, FLUX.2 and SD3 beside this file compare what their layouts compute."""
LAYOUTS = {
    "original": lambda spec, path, config: write_original(spec, path / "m.safetensors", config),
    "full checkpoint": lambda spec, path, config: write_original(spec, path / "m.safetensors", config, PREFIX),
    "diffusers file": lambda spec, path, config: write_diffusers_file(spec, path / "m.safetensors", config),
    "transformer folder": lambda spec, path, config: write_diffusers_folder(spec, path / "m", config),
}


def test_the_table_has_every_family():
    assert {files.spec for files in FILES.values()} == {spec.name for spec in MODELS}


def as_read(found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, with the ratio of `config` where it makes as wide a feed-forward: more no file tells of it."""
    if "hidden_size" not in config:
        return dict(found)
    assert int(found["mlp_ratio"] * found["hidden_size"]) == int(config["mlp_ratio"] * config["hidden_size"])
    return {**found, "mlp_ratio": config["mlp_ratio"]}


@pytest.mark.parametrize(("family", "kind"), CONFIGS)
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(family, kind):
    files, config = FILES[family], FILES[family].configs[kind]
    spec, diffusers = files.model, header(files, config, original=False)
    original = original_header(spec.keys, diffusers)
    assert original == header(files, config, original=True)
    found = spec.detect(original)
    assert found is not None
    assert as_read(found, config) == config
    assert spec.recognise(diffusers, {}) == found
    assert spec.recognise(diffusers, config) == config
    assert spec.detect(diffusers) is None
    assert spec.recognise(original, {}) is None
    for other in MODELS:
        assert other is spec or (other.detect(original) is None and other.recognise(diffusers, {}) is None)


def header_of_relative(files: FamilyFiles, relative: Relative) -> dict[str, TensorInfo]:
    removed, added, _ = relative
    keys = header(files, files.config, original=True)
    keys = {key: info for key, info in keys.items() if removed is None or not key.startswith(removed)}
    return keys | {added: TensorInfo((8, 8), "F32")} if added else keys


@pytest.mark.parametrize(("family", "relative"), RELATIVES)
def test_relatives_in_the_same_key_style_are_not_taken(family, relative):
    assert FILES[family].model.detect(header_of_relative(FILES[family], relative)) is None


@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize(("family", "relative"), [(family, relative) for family, relative in RELATIVES if relative[2]])
def test_relatives_in_the_same_key_style_are_refused_by_name(family, relative, prefix, tmp_path):
    keys = header_of_relative(FILES[family], relative)
    save_file({prefix + key: torch.zeros(info.shape) for key, info in keys.items()}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModelError, match=relative[2]):
        open_checkpoint(tmp_path / "m.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", SMALLEST)
def test_every_layout_gives_the_same_weights_and_config(family, layout, tmp_path):
    spec, config = FILES[family].model, FILES[family].configs[SMALLEST[family]]
    checkpoint = open_checkpoint(LAYOUTS[layout](spec, tmp_path, config))
    assert checkpoint.spec is spec
    # Through JSON, as tuples come back as lists from a folder.
    read, made = (json.loads(json.dumps(dict(each))) for each in (checkpoint.config, config))
    assert {key: as_read(read, made)[key] for key in made} == made
    loaded, expected = load_transformer(checkpoint, torch.float32, CPU).state_dict(), make_state_dict(spec, config)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
