"""A file as ComfyUI recognises it: by its header, with ComfyUI's reasons where it cannot use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.host_file import HostFile
from tests.comfyui_checkout import HOW, find_comfyui
from tests.tiny_flux import write_original

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)

SCRIPT = """
import sys
from parallel_runtime.networks.comfyui.host_code import use_comfyui
use_comfyui(sys.argv[1], {"cpu": True})
from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.host_file import open_host_file
from parallel_runtime.networks.comfyui.description import describe_network
for path in sys.argv[2:]:
    try:
        file = open_host_file(path)
        described = describe_network(file.build(), file.size, file.config.latent_format.latent_dimensions)
        print(described.facts.title, described.facts.heads, described.patch, len(described.facts.block_sizes),
              file.stored, sum(not tensor.is_meta for tensor in file.state_dict.values()) > 0)
    except ParallelError as error:
        print(type(error).__name__, error.cause)
"""


def looked_at(*files: Path) -> list[str]:
    """What is said of each file, in a process that has ComfyUI."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", SCRIPT, str(COMFYUI), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.strip()][-len(files) :]


def test_files_are_known_by_their_header_or_refused_with_comfyuis_reason(tmp_path):
    whole = write_original(tmp_path / "whole.safetensors")
    prefixed = write_original(tmp_path / "prefixed.safetensors", prefix="model.diffusion_model.")
    tensors = load_file(whole)
    strange = {**tensors, "txt_in.weight": torch.zeros(500, 64), "txt_in.bias": torch.zeros(500)}
    save_file(strange, tmp_path / "strange.safetensors")
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, tmp_path / "vae.safetensors")
    names = ("strange", "vae")
    said = looked_at(whole, prefixed, *(tmp_path / f"{name}.safetensors" for name in names))
    blocks = len({key.split(".")[1] for key in tensors if key.startswith("double_blocks.")})
    blocks += len({key.split(".")[1] for key in tensors if key.startswith("single_blocks.")})
    assert said[0] == said[1] == f"FLUX, LongCat and Ovis 4 (2, 2) {blocks} torch.float32 True"
    assert said[2].startswith("UnsupportedModelError ComfyUI cannot build the network of strange.safetensors: ")
    assert "is a VAE, not a diffusion model supported by this ComfyUI" in said[3]


def test_weights_beside_the_network_are_refused_by_name(monkeypatch):
    for name in ("comfy", "comfy.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["comfy"].ops = sys.modules["comfy.ops"]
    sys.modules["comfy.ops"].disable_weight_init = None
    model = nn.Module()
    model.diffusion_model = nn.Linear(2, 2, device="meta")

    def config() -> SimpleNamespace:
        built = {"set_inference_dtype": lambda *types: None, "get_model": lambda *given, **options: model}
        return SimpleNamespace(custom_operations=None, **built)

    def build() -> nn.Module:
        return HostFile(Path("song.safetensors"), (), config(), {}, 0, torch.float32, {}).build()

    assert build() is model.diffusion_model
    model.lengths = nn.Linear(2, 2)
    assert build() is model.diffusion_model
    model.lengths = nn.Linear(2, 2, device="meta")
    with pytest.raises(UnsupportedModelError, match=r"song.safetensors has weights beside its network \(lengths"):
        build()
