"""Opening model files and loading them: layouts, dtypes, memory shared between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.load_transformer import load_transformer
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.files import identity
from parallel_runtime.networks.comfyui.without_weights import WithoutWeights
from parallel_runtime.networks.diffusers.flux import FLUX
from tests.tiny_flux import (
    make_state_dict,
    tiny_config,
    weights_file,
    write_diffusers_folder,
)

CPU = torch.device("cpu")
CONFIG = tiny_config(num_attention_heads=2, num_layers=1, num_single_layers=1)
ROOT = Path(__file__).resolve().parents[2]

LAYOUTS = {
    "transformer folder": lambda path: write_diffusers_folder(path / "m", CONFIG),
    "pipeline folder": lambda path: write_diffusers_folder(path / "m", CONFIG, pipeline=True),
    "sharded folder": lambda path: write_diffusers_folder(path / "m", CONFIG, shards=3),
    "shards without index": lambda path: _without_index(write_diffusers_folder(path / "m", CONFIG, shards=2)),
    "old config": lambda path: _with_config(write_diffusers_folder(path / "m", CONFIG), out_channels=None),
    "a variant beside": lambda path: _with_variant(write_diffusers_folder(path / "m", CONFIG)),
}


def _without_index(folder: Path) -> Path:
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    return folder


def _with_config(folder: Path, **changes) -> Path:
    written = json.loads((folder / "config.json").read_text())
    written = {key: value for key, value in {**written, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _with_variant(folder: Path) -> Path:
    save_file({"other": torch.ones(1)}, folder / "diffusion_pytorch_model.fp16.safetensors")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(layout, tmp_path):
    checkpoint = open_checkpoint(LAYOUTS[layout](tmp_path))
    assert checkpoint.spec is FLUX
    transformer: Any = load_transformer(checkpoint, torch.float32, CPU)
    loaded = transformer.state_dict()
    # An old config says less, and the class the rest.
    assert {"out_channels": 64, **checkpoint.config, "axes_dims_rope": (16, 56, 56)} == CONFIG
    assert FLUX.output_shape((1, 16, 4, 4), transformer.config) == (1, 16, 4, 4)
    expected = make_state_dict(CONFIG)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_cast_to_the_wanted_dtype(stored, wanted, tmp_path):
    path = write_diffusers_folder(tmp_path / "m", CONFIG, dtype=stored)
    loaded = load_transformer(open_checkpoint(path), wanted, CPU).state_dict()
    expected = make_state_dict(CONFIG, stored)
    assert all(loaded[name].dtype == wanted and torch.equal(loaded[name], expected[name].to(wanted)) for name in loaded)


def test_the_loaded_model_is_the_class_of_diffusers_with_that_state_dict(tmp_path):
    from diffusers import FluxTransformer2DModel

    checkpoint = open_checkpoint(write_diffusers_folder(tmp_path / "m", CONFIG))
    loaded = load_transformer(checkpoint, torch.float32, CPU)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    reference: Any = FluxTransformer2DModel(**CONFIG)
    reference.eval().load_state_dict(make_state_dict(CONFIG))
    arguments = FLUX.to_transformer(
        torch.randn(2, 16, 6, 5), torch.tensor([0.9, 0.2]), torch.randn(2, 4, 64), CONFIG, guidance=torch.ones(2)
    )
    with torch.no_grad():
        expected = reference(**arguments).sample
        assert expected.std() > 0.1
        assert torch.equal(loaded(**arguments).sample, expected)


def test_a_head_dim_that_only_config_json_tells_is_taken_from_there(tmp_path):
    config = tiny_config(attention_head_dim=32, num_attention_heads=2, axes_dims_rope=(8, 12, 12))
    checkpoint = open_checkpoint(write_diffusers_folder(tmp_path / "m", config))
    loaded: Any = load_transformer(checkpoint, torch.float32, CPU)
    assert loaded.config["axes_dims_rope"] == [8, 12, 12]


def test_buffers_that_no_file_holds_keep_their_values():
    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    with WithoutWeights():
        module: Any = Rotary()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert module.frequencies.tolist() == [0, 1, 2, 3]
    assert torch.nn.Linear(1, 1).weight.device.type == "cpu"


def test_loading_stops_where_the_caller_cancels(tmp_path):
    class Cancelled(BaseException):
        pass

    def cancel():
        raise Cancelled

    checkpoint = open_checkpoint(write_diffusers_folder(tmp_path / "m", CONFIG))
    with pytest.raises(Cancelled):
        load_transformer(checkpoint, torch.float32, CPU, cancel)


@pytest.mark.parametrize("changed", ["config.json", "diffusion_pytorch_model-00001-of-00002.safetensors"])
def test_identity_changes_when_a_file_is_replaced(changed, tmp_path):
    path = write_diffusers_folder(tmp_path / "m", CONFIG, shards=2)
    before = identity(path)
    assert open_checkpoint(path).identity == before == identity(path)
    os.utime(path / changed, ns=(1, 1))
    assert identity(path) != before


def test_a_single_file_is_refused_with_what_to_give_instead(tmp_path):
    path = weights_file(write_diffusers_folder(tmp_path / "m", CONFIG))
    with pytest.raises(UnsupportedModelError, match="is a single file") as error:
        open_checkpoint(path)
    assert error.value.fix == "Give ComfyUI's folder, or the folder that diffusers saved."


@pytest.mark.slow
def test_opening_needs_neither_diffusers_nor_a_network(tmp_path):
    path = write_diffusers_folder(tmp_path / "m", CONFIG)
    script = (
        "import sys; from parallel_runtime.loading.checkpoint import open_checkpoint;"
        "print(open_checkpoint(sys.argv[1]).spec.transformer_class, 'diffusers' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.split() == ["FluxTransformer2DModel", "False"], done.stderr
