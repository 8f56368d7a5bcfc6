"""The MODEL that the loaders make is gone with the last reference to it, as ComfyUI's memory management wants it: what
waits for Python's garbage collector is "Potential memory leak detected" in ComfyUI's log, and a pause of the prompt."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from parallel_runtime.loading.host_file import open_host_file
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.patching.patch_data import UNPATCHED
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui
from tests.tiny_model import write_original
from tests.tiny_sd3 import tiny_config

pytestmark = [pytest.mark.host, pytest.mark.skipif(find_comfyui() is None, reason=HOW)]


def test_a_model_goes_with_the_last_reference_to_it(tmp_path):
    (remote_model,) = import_with_comfyui("nodes.remote_model")
    file = open_host_file(write_original(SD3, tmp_path / "model.safetensors", tiny_config()))
    remote = SimpleNamespace(patches=UNPATCHED, model=None)
    patcher = remote_model.build_model(file, *remote_model.choose_types(file, "bf16"), remote)
    model = weakref.ref(patcher.model)
    gc.collect()
    gc.disable()
    try:
        del patcher
        assert model() is None
    finally:
        gc.enable()
