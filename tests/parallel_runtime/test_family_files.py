"""Every family's files: the config from the shapes, relatives refused, the same weights from every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.loading.checkpoint import name_contents, open_checkpoint
from parallel_runtime.networks.diffusers.headers import original_header
from parallel_runtime.networks.diffusers.registry import MODELS
from tests.family_files import FILES, header
from tests.parallel_runtime.model_forward import CPU
from tests.tiny_model import make_state_dict, write_diffusers_folder

CONFIGS = [(family, kind) for family, files in FILES.items() for kind in files.configs]
SMALLEST = {"PixArt": "alpha, one layer", "HunyuanDiT": "1.1", "SDXL": "KOALA", "Wan": "one head"}
"""Which config is loaded. Tests of FLUX.1, FLUX.2 and SD3 beside this file compare what their layouts compute."""


def test_the_table_has_every_family():
    assert {files.spec for files in FILES.values()} == {spec.name for spec in MODELS}


def as_read(found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, with the ratio of `config` where it makes as wide a feed-forward: more no file tells of it."""
    if "hidden_size" not in config:
        return dict(found)
    assert int(found["mlp_ratio"] * found["hidden_size"]) == int(config["mlp_ratio"] * config["hidden_size"])
    return {**found, "mlp_ratio": config["mlp_ratio"]}


@pytest.mark.parametrize(("family", "kind"), CONFIGS)
def test_the_config_comes_back_from_the_shapes_and_the_authors_names_too(family, kind):
    files, config = FILES[family], FILES[family].configs[kind]
    spec, diffusers = files.model, header(files, config, original=False)
    assert original_header(spec.keys, diffusers) == header(files, config, original=True)
    found = spec.recognise(diffusers, {})
    assert found is not None
    assert as_read(found, config) == config
    assert spec.recognise(diffusers, config) == config
    assert all(other is spec or other.recognise(diffusers, {}) is None for other in MODELS)


@pytest.mark.parametrize(
    ("family", "relative"), [(family, relative) for family, files in FILES.items() for relative in files.relatives]
)
def test_relatives_in_the_same_key_style_have_their_name(family, relative):
    removed, added, named = relative
    keys = set(header(FILES[family], FILES[family].config, original=True))
    kept = {key for key in keys if removed is None or not key.startswith(removed)}
    assert named in str(name_contents(kept | ({added} if added else set())))


@pytest.mark.parametrize("family", SMALLEST)
def test_a_folder_gives_the_weights_and_config(family, tmp_path):
    spec, config = FILES[family].model, FILES[family].configs[SMALLEST[family]]
    checkpoint = open_checkpoint(write_diffusers_folder(spec, tmp_path / "m", config))
    assert checkpoint.spec is spec
    # Through JSON, as tuples come back as lists from a folder.
    read, made = (json.loads(json.dumps(dict(each))) for each in (checkpoint.config, config))
    assert {key: as_read(read, made)[key] for key in made} == made
    loaded, expected = load_transformer(checkpoint, torch.float32, CPU).state_dict(), make_state_dict(spec, config)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
