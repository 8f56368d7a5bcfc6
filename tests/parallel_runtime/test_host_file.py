"""A file as ComfyUI recognises it: by its header, with ComfyUI's reasons where it cannot use it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallel_runtime.loading.host_file import HostFile
from parallel_runtime.requests.facts import FLOAT8, INT8, PLAIN, QUANTISED
from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks
from tests.tiny_flux import write_original

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)

ONES = torch.ones(2, 2)


def said(function: str, *files: Path) -> list[str]:
    """What a function of host_file_run.py says of files, in a process that has ComfyUI."""
    arguments = {"comfyui": str(COMFYUI), "files": list(map(str, files))}
    (found,) = run_ranks(1, f"tests.parallel_runtime.host_file_run:{function}", arguments)
    return found["said"]


@pytest.mark.slow
def test_files_are_known_by_their_header_or_refused_with_comfyuis_reason(tmp_path):
    whole = write_original(tmp_path / "whole.safetensors")
    prefixed = write_original(tmp_path / "prefixed.safetensors", prefix="model.diffusion_model.")
    tensors = load_file(whole)
    strange = {**tensors, "txt_in.weight": torch.zeros(500, 64), "txt_in.bias": torch.zeros(500)}
    save_file(strange, tmp_path / "strange.safetensors")
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, tmp_path / "vae.safetensors")
    save_file({"head.modulation": torch.ones(1, 2, 8)}, tmp_path / "parts.safetensors")
    video = {"head.modulation": torch.ones(1, 2, 8), "head.head.weight": torch.ones(8, 8)}
    video |= {"blocks.0.ffn.0.weight": torch.ones(8, 8), "patch_embedding.weight": torch.ones(8, 8, 1, 2, 2)}
    for name, config in (("layers", '{"transformer": {"num_layers": 1000000000}}'), ("text", "{")):
        save_file(video, tmp_path / f"{name}.safetensors", {"config": config})
    names = ("strange", "vae", "parts", "layers", "text")
    told = said("look_at", whole, prefixed, *(tmp_path / f"{name}.safetensors" for name in names))
    blocks = len({key.split(".")[1] for key in tensors if key.startswith("double_blocks.")})
    blocks += len({key.split(".")[1] for key in tensors if key.startswith("single_blocks.")})
    assert told[0] == told[1] == f"FLUX, LongCat and Ovis 4 (2, 2) {blocks} torch.float32 True"
    assert told[2].startswith("UnsupportedModelError ComfyUI cannot build the network of strange.safetensors: ")
    assert "is a VAE, not a diffusion model supported by this ComfyUI" in told[3]
    assert told[4].startswith("UnsupportedModelError ComfyUI cannot tell what parts.safetensors is: KeyError: 'head.")
    assert "says num_layers 1000000000, and at most 256 can be" in told[5]
    assert told[6].startswith("UnsupportedModelError ComfyUI cannot tell what text.safetensors is: JSONDecodeError")


@pytest.mark.slow
def test_what_layers_take_is_told_by_the_file(tmp_path):
    wanted = {"bfloat16": PLAIN, "fp8": PLAIN, "float8_e4m3fn": FLOAT8, "int8_tensorwise": INT8}
    wanted |= {"float8_e4m3fn+input": FLOAT8, "scaled_fp8": QUANTISED}
    whole = write_original(tmp_path / "whole.safetensors")
    names = [Path(f"{tmp_path}/{name}.safetensors {name}") for name in wanted]
    assert dict(zip(wanted, said("take", whole, *names), strict=True)) == wanted


@pytest.mark.slow
def test_a_unet_in_the_names_of_diffusers_is_what_comfyui_makes_of_it(tmp_path):
    assert said("look_at_sdxl_in_names_of_diffusers", tmp_path / "unet.safetensors") == ["SDXL", "", "True"]


@pytest.mark.slow
def test_layers_have_parameters_where_comfyui_streams_weights(tmp_path):
    assert said("build_streamed", write_original(tmp_path / "file.safetensors")) == ["True True"]


def test_weights_beside_the_network_are_real_and_the_networks_are_not(tmp_path):
    tensors = {"lengths.weight": torch.randn(3, 2).half(), "lengths.bias": torch.randn(3), "network.weight": ONES}
    save_file(tensors, path := tmp_path / "song.safetensors")

    def get_model(state_dict: dict[str, torch.Tensor], prefix: str, device: torch.device) -> nn.Module:
        model = nn.Module()
        model.diffusion_model = nn.Module()
        model.diffusion_model.weight = nn.Parameter(torch.empty(2, 2))
        # As ComfyUI's operations make layers.
        model.lengths = skip_init(nn.Linear, 2, 3)
        model.lengths.load_state_dict({name: state_dict.pop(f"lengths.{name}") for name in ("weight", "bias")})
        assert "lengths.bias" not in state_dict
        return model

    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    file = HostFile(path, (), SimpleNamespace(get_model=get_model), on_meta, 0, None)
    model = file.build_model()
    assert file.beside == {"lengths.weight", "lengths.bias"}
    assert model.diffusion_model.weight.is_meta
    assert torch.equal(model.lengths.weight, tensors["lengths.weight"].float())
    assert torch.equal(model.lengths.bias, tensors["lengths.bias"])


class NaDiT(nn.Module):
    """By its name SeedVR2's network."""

    __module__, __qualname__ = "comfy.ldm.seedvr.model", "NaDiT"

    def __init__(self):
        super().__init__()
        for name in ("positive_conditioning", "negative_conditioning"):
            self.register_buffer(name, torch.empty(3, 2))
        self.weight = nn.Parameter(torch.empty(2, 2))


def test_prompts_that_nodes_take_out_of_a_network_are_real(tmp_path):
    prompts = {name: torch.randn(3, 2).half() for name in ("positive_conditioning", "negative_conditioning")}
    save_file({f"net.{name}": tensor for name, tensor in prompts.items()}, path := tmp_path / "upscaler.safetensors")

    def get_model(*given: object, **named: object) -> nn.Module:
        model = nn.Module()
        model.diffusion_model = NaDiT()
        return model

    on_meta = {name: tensor.to("meta") for name, tensor in {**prompts, "weight": ONES}.items()}
    file = HostFile(path, (), SimpleNamespace(get_model=get_model), on_meta, 0, None, "net.")
    network = file.build_model().diffusion_model
    assert torch.equal(network.positive_conditioning, prompts["positive_conditioning"].float())
    assert torch.equal(network.negative_conditioning, prompts["negative_conditioning"].float())
    assert network.weight.is_meta


def skip_init(kind: type[nn.Module], *sizes: int) -> nn.Module:
    """A layer whose weights are made by torch.empty and are not drawn."""
    return type(kind.__name__, (kind,), {"reset_parameters": lambda self: None})(*sizes)


@pytest.mark.slow
def test_what_comfyui_cannot_read_another_version_and_a_packs_own_model_are_named(tmp_path):
    tensors = load_file(write_original(tmp_path / "whole.safetensors"))
    name = "double_blocks.0.img_attn.proj.weight"
    save_file({**tensors, name: torch.zeros(500, 512)}, tmp_path / "misshapen.safetensors")
    strange = {**tensors, "txt_in.weight": torch.zeros(500, 64), "txt_in.bias": torch.zeros(500)}
    strange["x_embedder.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)  # not plain: diffusers' class is out
    save_file(strange, tmp_path / "strange.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "lacking.safetensors")
    files = (tmp_path / f"{each}.safetensors" for each in ("whole", "misshapen", "strange", "lacking"))
    whole, misshapen, strange, complete, lacking, newer, pack = said("look_at_wrong_ones", *files)
    assert whole == "True FLUX, LongCat and Ovis "
    assert misshapen.startswith("UnsupportedModelError ComfyUI cannot load ")
    assert "size mismatch for double_blocks.0.img_attn.proj.weight" in misshapen
    assert strange.startswith("UnsupportedModelError ComfyUI cannot build the network of strange.safetensors: ")
    assert complete == ""
    assert lacking.startswith(f"The file lacks 1 of the network's weights, first {name}: what is in their")
    version = "this ComfyUI has another version of it, a block of double_blocks takes registers"
    assert newer == f"False FLUX, LongCat and Ovis {version}"
    assert pack.startswith("UnsupportedModelError whole.safetensors is a model of a node pack's own, ")
    assert "TheirModel of other_pack" in pack
