"""Files that cannot be loaded: each is refused in one readable sentence that names cause and fix."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.load_transformer import load_transformer
from parallel_runtime.errors import CheckpointError, ParallelError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import MODELS, name_contents, open_checkpoint
from tests.tiny_flux import tiny_config, weights_file, write_diffusers_folder

CPU = torch.device("cpu")
CONFIG = tiny_config(num_attention_heads=2, num_layers=1, num_single_layers=1)


def _without_index(folder: Path) -> Path:
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    return folder


def _with_config(folder: Path, **changes) -> Path:
    written = json.loads((folder / "config.json").read_text())
    written = {key: value for key, value in {**written, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"shape": shape, "dtype": dtype, "data_offsets": [begin, end]}


def _cut(folder: Path, size: int) -> Path:
    os.truncate(weights_file(write_diffusers_folder(folder, CONFIG)), size)
    return folder


def _in_folder(file: Path) -> Path:
    """The file as the weights of a folder of FLUX.1."""
    folder = _only_config(file.parent / "folder")
    file.rename(weights_file(folder))
    return folder


DAMAGED = {
    "missing": (lambda path: path / "no such.safetensors", "does not exist"),
    "empty": (lambda path: _cut(path / "m", 0), "is empty"),
    "a few bytes": (lambda path: _cut(path / "m", 5), "no safetensors file"),
    "cut in the header": (lambda path: _cut(path / "m", 500), "truncated"),
    "cut in the data": (lambda path: _cut(path / "m", 9_000_000), "truncated"),
    "bytes too many": (
        lambda path: _write(path / "m.safetensors", {"a": _entry([1], 0, 4)}, b"12345678"),
        "is damaged: its header promises",
    ),
    "absurd header length": (lambda path: _write(path / "m.safetensors", b"{}", length=2**60), "no safetensors file"),
    "header is no JSON": (lambda path: _write(path / "m.safetensors", b"{nonsense"), "damaged header"),
    "entry without a shape": (
        lambda path: _write(path / "m.safetensors", {"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
        "damaged header",
    ),
    "offsets that overlap": (
        lambda path: _write(path / "m.safetensors", {"a": _entry([1], 0, 4), "b": _entry([1], 2, 6)}, b"123456"),
        "tensor b",
    ),
    "bytes that do not fit the shape": (
        lambda path: _write(path / "m.safetensors", {"a": _entry([3], 0, 4)}, b"1234"),
        "tensor a",
    ),
    "web page": (lambda path: _text(path / "m.safetensors", "<!DOCTYPE html><html></html>"), "web page"),
    "LFS pointer": (lambda path: _text(path / "m.safetensors", "version https://git-lfs.github.com"), "git lfs pull"),
    "empty folder": (lambda path: path, "no config.json"),
    "folder without weights": (lambda path: _only_config(path / "m"), "no safetensors file"),
    "missing shard": (lambda path: _without_shard(path / "m"), "lacks 1 of 3 files"),
    "missing shard, no index": (lambda path: _without_index(_without_shard(path / "m")), "no complete set"),
    "config.json is no JSON": (lambda path: _bad_config(path / "m"), "not valid JSON"),
    "index outside of the folder": (lambda path: _index_outside(path / "m"), "does not list the files"),
}


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _only_config(folder: Path) -> Path:
    write_diffusers_folder(folder, CONFIG)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    return folder


def _without_shard(folder: Path) -> Path:
    write_diffusers_folder(folder, CONFIG, shards=3)
    (folder / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    return folder


def _bad_config(folder: Path) -> Path:
    write_diffusers_folder(folder, CONFIG)
    (folder / "config.json").write_text("{")
    return folder


def _index_outside(folder: Path) -> Path:
    write_diffusers_folder(folder, CONFIG, shards=2)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    return folder


def _assert_readable(error: ParallelError) -> None:
    assert error.cause.endswith(".")
    assert error.fix.endswith(".")
    assert "\n" not in str(error)


@pytest.mark.parametrize("damage", DAMAGED)
def test_missing_and_damaged_files_are_refused_with_cause_and_fix(damage, tmp_path):
    make, named = DAMAGED[damage]
    path = make(tmp_path)
    with pytest.raises(CheckpointError, match=named) as error:
        open_checkpoint(_in_folder(path) if path.is_file() else path)
    _assert_readable(error.value)


def _changed(path: Path, metadata: dict[str, str] | None = None, **tensors: torch.Tensor) -> Path:
    folder = write_diffusers_folder(path / "m", CONFIG)
    file = weights_file(folder)
    save_file({**load_file(file), **{key.replace("__", "."): value for key, value in tensors.items()}}, file, metadata)
    return folder


def _quantised_folder(folder: Path) -> Path:
    return _with_config(write_diffusers_folder(folder, CONFIG), quantization_config={"quant_method": "bitsandbytes"})


def _sdxl_pipeline(folder: Path) -> Path:
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    return folder


FP8 = torch.ones(2, 2).to(torch.float8_e4m3fn)
FOREIGN = {
    "GGUF under another name": (lambda path: _in_folder(_text(path / "m.safetensors", "GGUF and more")), "GGUF"),
    "pickle under another name": (lambda path: _in_folder(_pickle(path / "m.safetensors")), "pickle"),
    "another diffusers class": (
        lambda path: _with_config(write_diffusers_folder(path / "m", CONFIG), _class_name="AutoencoderKL"),
        "AutoencoderKL",
    ),
    "a transformers folder": (
        lambda path: _with_config(write_diffusers_folder(path / "m", CONFIG), _class_name=None),
        "no diffusers class",
    ),
    "a pipeline without a transformer": (lambda path: _sdxl_pipeline(path / "m"), "StableDiffusionXLPipeline"),
    "fp8": (lambda path: _changed(path, x_embedder__weight=torch.ones(256, 64).to(FP8.dtype)), "fp8 .*bf16"),
    "scaled fp8": (lambda path: _changed(path, scaled_fp8=FP8), "bf16, fp16 or fp32"),
    "int8": (lambda path: _changed(path, x_embedder__weight=torch.ones(256, 64).to(torch.int8)), "int8 .*bf16"),
    "comfy_quant": (lambda path: _changed(path, x_embedder__comfy_quant=torch.ones(2)), "bf16, fp16 or fp32"),
    "weight_scale": (lambda path: _changed(path, x_embedder__weight_scale=torch.ones(())), "bf16, fp16 or fp32"),
    "quantised by metadata": (
        lambda path: _changed(path, {"_quantization_metadata": '{"layers": {}}'}),
        "bf16, fp16 or fp32",
    ),
    "quantised folder": (lambda path: _quantised_folder(path / "m"), "bf16, fp16 or fp32"),
}


def _pickle(path: Path) -> Path:
    torch.save({"a": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_that_are_no_supported_transformer_are_named_and_refused(kind, tmp_path):
    make, named = FOREIGN[kind]
    with pytest.raises(UnsupportedModelError, match=named) as error:
        open_checkpoint(make(tmp_path))
    _assert_readable(error.value)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ((), "without tensors"),
        (("b.weight", "a.weight"), "such as a.weight, b.weight"),
        (("encoder.conv_in.weight", "decoder.conv_in.weight"), "a VAE"),
        (("text_model.encoder.layers.0.mlp.fc1.weight",), "a CLIP text encoder"),
        (("encoder.block.0.layer.0.SelfAttention.q.weight",), "a T5 text encoder"),
        (("diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",), "a LoRA"),
        (("lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight",), "a LoRA"),
        (("controlnet_blocks.0.weight", "double_blocks.0.img_attn.qkv.weight"), "a ControlNet"),
        (("blocks.0.mlp.inverted_conv.conv.weight", "x_embedder.proj.weight"), "a Sana"),
        (("temporal_transformer_blocks.0.attn1.to_q.weight",), "a Latte"),
        (("encoder_hid_proj.weight", "input_blocks.0.0.weight"), "a Kolors"),
    ],
)
def test_what_a_foreign_file_is_is_told_from_its_keys(keys, named):
    assert named in str(name_contents(keys))


def test_the_error_for_a_foreign_folder_lists_what_is_supported(tmp_path):
    with pytest.raises(UnsupportedModelError) as error:
        open_checkpoint(_with_config(write_diffusers_folder(tmp_path / "m", CONFIG), _class_name="AutoencoderKL"))
    assert all(spec.title in error.value.fix for spec in MODELS)


def test_missing_and_misshapen_tensors_are_named_and_counted(tmp_path):
    path = write_diffusers_folder(tmp_path / "m", CONFIG)
    file = weights_file(path)
    gone, bent = ("proj_out.weight", "proj_out.bias"), "x_embedder.bias"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if key not in gone}, file)
    with pytest.raises(CheckpointError, match=rf"lacks 2 of \d+ tensors .*first {min(gone)}") as error:
        load_transformer(open_checkpoint(path), torch.float32, CPU)
    _assert_readable(error.value)
    save_file({**tensors, bent: torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=rf"1 tensors .*first {bent}: \(3,\) where .*\(256,\)"):
        load_transformer(open_checkpoint(path), torch.float32, CPU)


def test_a_config_that_the_class_does_not_take_is_refused(tmp_path):
    folder = _with_config(write_diffusers_folder(tmp_path / "m", CONFIG), from_the_future=1)
    with pytest.raises(UnsupportedModelError, match="from_the_future"):
        load_transformer(open_checkpoint(folder), torch.float32, CPU)
