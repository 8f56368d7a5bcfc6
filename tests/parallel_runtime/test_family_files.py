"""Every family's files: config and weights of a folder."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.loading.checkpoint import MODELS, open_checkpoint
from tests.authors_names import NAMES
from tests.family_files import FILES
from tests.parallel_runtime.model_forward import CPU
from tests.tiny_model import make_state_dict, write_diffusers_folder

SMALLEST = {"PixArt": "alpha, one layer", "HunyuanDiT": "1.1", "SDXL": "KOALA", "Wan": "one head"}
"""Which config is loaded. Tests of FLUX.1, FLUX.2 and SD3 beside this file compare what their layouts compute."""


def test_the_table_has_every_family():
    assert {files.spec for files in FILES.values()} == {NAMES[spec.transformer_class] for spec in MODELS}


@pytest.mark.parametrize("family", SMALLEST)
def test_a_folder_gives_the_weights_and_config(family, tmp_path):
    spec, config = FILES[family].model, FILES[family].configs[SMALLEST[family]]
    checkpoint = open_checkpoint(write_diffusers_folder(spec, tmp_path / "m", config))
    assert checkpoint.spec is spec
    # Through JSON, as tuples come back as lists from a folder.
    assert checkpoint.config == json.loads(json.dumps(config))
    loaded, expected = load_transformer(checkpoint, torch.float32, CPU).state_dict(), make_state_dict(spec, config)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
