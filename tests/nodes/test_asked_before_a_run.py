"""What ComfyUI asks of a network before a run, and no pool answers, is refused in a sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.host_file import open_host_file
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.patching.patch_data import UNPATCHED
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui
from tests.tiny_model import write_original
from tests.tiny_sd3 import tiny_config

pytestmark = [pytest.mark.host, pytest.mark.skipif(find_comfyui() is None, reason=HOW)]


def test_a_prefix_that_a_network_is_asked_for_is_refused(tmp_path, monkeypatch):
    remote_model, sd3 = import_with_comfyui("nodes.remote_model", "comfy.ldm.modules.diffusionmodules.mmdit")
    network = sd3.OpenAISignatureMMDITWrapper
    monkeypatch.setattr(network, "preprocess_prefix", lambda self, tokens: (tokens, tokens), raising=False)
    file = open_host_file(write_original(SD3, tmp_path / "model.safetensors", tiny_config()))
    remote = SimpleNamespace(patches=UNPATCHED, model=None)
    patcher = remote_model.build_model(file, *remote_model.choose_types(file, "bf16"), remote)
    with pytest.raises(UnsupportedModelError, match=r"asks OpenAISignatureMMDITWrapper for preprocess_prefix"):
        patcher.model.diffusion_model.preprocess_prefix(tokens=None)
