"""The MODEL that the loaders make is gone with the last reference to it, as ComfyUI's memory management wants it: what
waits for Python's garbage collector is "Potential memory leak detected" in ComfyUI's log, and a pause of the prompt."""

from __future__ import annotations

import gc
import sys
import weakref
from importlib import import_module
from types import SimpleNamespace

import pytest

from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.patching.patch_data import UNPATCHED
from tests.comfyui_checkout import HOW, find_comfyui
from tests.tiny_model import write_original
from tests.tiny_sd3 import tiny_config

COMFYUI = find_comfyui()
pytestmark = [pytest.mark.host, pytest.mark.skipif(COMFYUI is None, reason=HOW)]


@pytest.fixture
def remote_model():
    sys.path.append(str(COMFYUI))
    try:
        import_module("comfy.cli_args").args.cpu = True
        return import_module("nodes.remote_model")
    finally:
        sys.path.remove(str(COMFYUI))


def test_a_model_goes_with_the_last_reference_to_it(remote_model, tmp_path):
    path = write_original(SD3, tmp_path / "model.safetensors", tiny_config())
    blueprint = remote_model.draw_blueprint(open_checkpoint(path))
    remote = SimpleNamespace(patches=UNPATCHED, model=None)
    patcher = remote_model.build_model(blueprint, remote_model.choose_types(blueprint, "bf16"), remote)
    model = weakref.ref(patcher.model)
    gc.collect()
    gc.disable()
    try:
        del patcher
        assert model() is None
    finally:
        gc.enable()
