"""Opening model files and loading them: layouts, damaged and foreign files, shared memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.errors import CheckpointError, ParallelError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.files import identity
from parallel_runtime.loading.weights import load_transformer
from parallel_runtime.models.flux import FLUX
from parallel_runtime.registry import MODELS, find_by_name, find_by_transformer_class
from tests.tiny_flux import (
    make_state_dict,
    tiny_config,
    write_diffusers_file,
    write_diffusers_folder,
    write_original,
)

CPU = torch.device("cpu")
CONFIG = tiny_config(num_attention_heads=2, num_layers=1, num_single_layers=1)
ROOT = Path(__file__).resolve().parents[2]

LAYOUTS = {
    "original": lambda path: write_original(path / "m.safetensors", CONFIG),
    "diffusion_model.": lambda path: write_original(path / "m.safetensors", CONFIG, prefix="diffusion_model."),
    "model.diffusion_model.": lambda path: write_original(
        path / "m.safetensors", CONFIG, prefix="model.diffusion_model.", norm_key="weight"
    ),
    "renamed norms": lambda path: write_original(path / "m.safetensors", CONFIG, norm_key="weight"),
    "full checkpoint": lambda path: _full_checkpoint(path / "m.safetensors"),
    "diffusers file": lambda path: write_diffusers_file(path / "m.safetensors", CONFIG),
    "transformer folder": lambda path: write_diffusers_folder(path / "m", CONFIG),
    "pipeline folder": lambda path: write_diffusers_folder(path / "m", CONFIG, pipeline=True),
    "sharded folder": lambda path: write_diffusers_folder(path / "m", CONFIG, shards=3),
    "shards without index": lambda path: _without_index(write_diffusers_folder(path / "m", CONFIG, shards=2)),
    "old config": lambda path: _with_config(write_diffusers_folder(path / "m", CONFIG), out_channels=None),
    "a variant beside": lambda path: _with_variant(write_diffusers_folder(path / "m", CONFIG)),
}


def _full_checkpoint(path: Path) -> Path:
    write_original(path, CONFIG, prefix="model.diffusion_model.")
    others = {
        "first_stage_model.decoder.conv_in.weight": torch.ones(2, 2),
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight": torch.ones(2).to(torch.int8),
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight": torch.ones(2, 2),
    }
    save_file({**load_file(path), **others}, path)
    return path


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
    loaded = load_transformer(checkpoint, torch.float32, CPU).state_dict()
    assert {**checkpoint.config, "axes_dims_rope": (16, 56, 56)} == CONFIG
    expected = make_state_dict(CONFIG)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_cast_to_the_wanted_dtype(stored, wanted, tmp_path):
    path = write_original(tmp_path / "m.safetensors", CONFIG, dtype=stored)
    loaded = load_transformer(open_checkpoint(path), wanted, CPU).state_dict()
    expected = make_state_dict(CONFIG, stored)
    assert all(loaded[name].dtype == wanted and torch.equal(loaded[name], expected[name].to(wanted)) for name in loaded)


def test_the_loaded_model_is_the_class_of_diffusers_with_that_state_dict(tmp_path):
    from diffusers import FluxTransformer2DModel

    loaded = load_transformer(open_checkpoint(write_original(tmp_path / "m.safetensors", CONFIG)), torch.float32, CPU)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    reference = FluxTransformer2DModel(**CONFIG).eval()
    reference.load_state_dict(make_state_dict(CONFIG))
    arguments = FLUX.adapter.to_transformer(
        torch.randn(2, 16, 6, 5), torch.tensor([0.9, 0.2]), torch.randn(2, 4, 64), CONFIG, guidance=torch.ones(2)
    )
    with torch.no_grad():
        expected = reference(**arguments).sample
        assert expected.std() > 0.1
        assert torch.equal(loaded(**arguments).sample, expected)


def test_a_head_dim_that_only_config_json_tells_is_taken_from_there(tmp_path):
    config = tiny_config(attention_head_dim=32, num_attention_heads=2, axes_dims_rope=(8, 12, 12))
    checkpoint = open_checkpoint(write_diffusers_folder(tmp_path / "m", config))
    assert load_transformer(checkpoint, torch.float32, CPU).config["axes_dims_rope"] == [8, 12, 12]


def _mapped(path: Path) -> list[tuple[int, int]]:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [(int(low, 16), int(high, 16)) for low, high in (line.split()[0].split("-") for line in lines)]


def test_parameters_are_views_of_the_mapped_file(tmp_path):
    path = write_original(tmp_path / "m.safetensors", CONFIG)
    loaded = load_transformer(open_checkpoint(path), torch.float32, CPU)
    spans = _mapped(path)
    copied = {
        name
        for name, parameter in loaded.named_parameters()
        if not any(low <= parameter.data_ptr() < high for low, high in spans)
    }
    assert copied == {"norm_out.linear.weight", "norm_out.linear.bias"}  # their halves change places


def test_buffers_that_no_file_holds_keep_their_values():
    from parallel_runtime.loading.weights import _meta_parameters

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    with _meta_parameters():
        module = Rotary()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert module.frequencies.tolist() == [0, 1, 2, 3]
    assert torch.nn.Linear(1, 1).weight.device.type == "cpu"


SHARE = """
import sys
from pathlib import Path
import torch
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.weights import load_transformer
from parallel_runtime.models.flux import FLUX

def proportional():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

checkpoint = open_checkpoint(sys.argv[1])
arguments = FLUX.adapter.to_transformer(
    torch.ones(1, 16, 4, 4), torch.ones(1), torch.ones(1, 4, 64), checkpoint.config, guidance=torch.ones(1)
)
import diffusers; diffusers.FluxTransformer2DModel  # its own memory does not count
print("ready", flush=True); sys.stdin.readline()
before = proportional()
print("measured", flush=True); sys.stdin.readline()
transformer = load_transformer(checkpoint, torch.float32, torch.device("cpu"))
with torch.no_grad():
    assert transformer(**arguments).sample.isfinite().all()
print("loaded", flush=True); sys.stdin.readline()
print(proportional() - before, flush=True); sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc/self/smaps_rollup")
def test_three_processes_share_one_copy_of_the_file(tmp_path):
    path = write_original(tmp_path / "m.safetensors", tiny_config(num_attention_heads=4))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(3)
    ]
    try:
        for expected in ("ready", "measured", "loaded", None):
            answers = []
            for process in processes:
                assert process.stdout is not None
                answers.append(process.stdout.readline().strip())
            assert expected is None or answers == [expected] * 3
            for process in processes if expected else ():
                assert process.stdin is not None
                print(file=process.stdin, flush=True)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    size = path.stat().st_size
    taken = 1024 * sum(map(int, answers))
    assert 0.8 * size < taken < 1.8 * size, f"{taken / size:.2f} copies"


def _write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"shape": shape, "dtype": dtype, "data_offsets": [begin, end]}


def _cut(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


DAMAGED = {
    "missing": (lambda path: path / "no such.safetensors", "does not exist"),
    "empty": (lambda path: _cut(write_original(path / "m.safetensors", CONFIG), 0), "is empty"),
    "a few bytes": (lambda path: _cut(write_original(path / "m.safetensors", CONFIG), 5), "no safetensors file"),
    "cut in the header": (lambda path: _cut(write_original(path / "m.safetensors", CONFIG), 500), "truncated"),
    "cut in the data": (lambda path: _cut(write_original(path / "m.safetensors", CONFIG), 9_000_000), "truncated"),
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
    with pytest.raises(CheckpointError, match=named) as error:
        open_checkpoint(make(tmp_path))
    _assert_readable(error.value)


def _keys(*keys: str):
    return lambda path: _saved(path / "m.safetensors", {key: torch.ones(2, 2) for key in keys})


def _saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def _changed(path: Path, metadata: dict[str, str] | None = None, **tensors: torch.Tensor) -> Path:
    file = write_original(path / "m.safetensors", CONFIG)
    save_file({**load_file(file), **{key.replace("__", "."): value for key, value in tensors.items()}}, file, metadata)
    return file


def _quantised_folder(folder: Path) -> Path:
    return _with_config(write_diffusers_folder(folder, CONFIG), quantization_config={"quant_method": "bitsandbytes"})


def _sdxl_pipeline(folder: Path) -> Path:
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    return folder


FP8 = torch.ones(2, 2).to(torch.float8_e4m3fn)
FOREIGN = {
    "GGUF": (lambda path: _text(path / "m.gguf", "GGUF and more"), "GGUF"),
    "GGUF under another name": (lambda path: _text(path / "m.safetensors", "GGUF and more"), "GGUF"),
    "pickle": (lambda path: _pickle(path / "m.ckpt"), "pickle"),
    "pickle under another name": (lambda path: _pickle(path / "m.safetensors"), "pickle"),
    "no tensors": (lambda path: _saved(path / "m.safetensors", {}), "without tensors"),
    "unknown": (_keys("b.weight", "a.weight"), "such as a.weight, b.weight"),
    "VAE": (_keys("encoder.conv_in.weight", "decoder.conv_in.weight"), "a VAE"),
    "CLIP": (_keys("text_model.encoder.layers.0.mlp.fc1.weight"), "a CLIP text encoder"),
    "T5": (_keys("encoder.block.0.layer.0.SelfAttention.q.weight"), "a T5 text encoder"),
    "LoRA": (_keys("diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight"), "a LoRA"),
    "kohya LoRA": (_keys("lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"), "a LoRA"),
    "ControlNet": (_keys("controlnet_blocks.0.weight", "double_blocks.0.img_attn.qkv.weight"), "a ControlNet"),
    "SDXL": (_keys("model.diffusion_model.label_emb.0.0.weight", "first_stage_model.x"), "an SDXL UNet"),
    "SD 1.5": (_keys("model.diffusion_model.input_blocks.0.0.weight"), "a Stable Diffusion UNet"),
    "Chroma": (lambda path: _changed(path, distilled_guidance_layer__in_proj__weight=torch.ones(2, 2)), "a Chroma"),
    "FLUX.2": (lambda path: _changed(path, double_stream_modulation_img__lin__weight=torch.ones(2, 2)), "a FLUX.2"),
    "SD3": (_keys("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight"), "an SD3"),
    "Wan": (_keys("blocks.0.self_attn.norm_q.weight", "patch_embedding.weight"), "a Wan"),
    "HunyuanVideo": (_keys("txt_in.individual_token_refiner.blocks.0.norm1.weight"), "a HunyuanVideo"),
    "Qwen-Image": (_keys("transformer_blocks.0.img_mod.1.weight"), "a Qwen-Image"),
    "FLUX without a pooled text": (_keys("double_blocks.0.img_attn.qkv.weight"), "that is not FLUX.1"),
    "another diffusers class": (
        lambda path: _with_config(write_diffusers_folder(path / "m", CONFIG), _class_name="AutoencoderKL"),
        "AutoencoderKL",
    ),
    "a transformers folder": (
        lambda path: _with_config(write_diffusers_folder(path / "m", CONFIG), _class_name=None),
        "no diffusers class",
    ),
    "a pipeline without a transformer": (lambda path: _sdxl_pipeline(path / "m"), "StableDiffusionXLPipeline"),
    "fp8": (lambda path: _changed(path, img_in__weight=torch.ones(256, 64).to(FP8.dtype)), "fp8 .*bf16"),
    "scaled fp8": (lambda path: _changed(path, scaled_fp8=FP8), "bf16, fp16 or fp32"),
    "int8": (lambda path: _changed(path, img_in__weight=torch.ones(256, 64).to(torch.int8)), "int8 .*bf16"),
    "comfy_quant": (lambda path: _changed(path, img_in__comfy_quant=torch.ones(2)), "bf16, fp16 or fp32"),
    "weight_scale": (lambda path: _changed(path, img_in__weight_scale=torch.ones(())), "bf16, fp16 or fp32"),
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


def test_the_error_for_a_foreign_file_lists_what_is_supported(tmp_path):
    with pytest.raises(UnsupportedModelError) as error:
        open_checkpoint(_keys("encoder.conv_in.weight")(tmp_path))
    assert all(spec.title in error.value.fix for spec in MODELS)


@pytest.mark.parametrize("layout", ["original", "folder"])
def test_missing_and_misshapen_tensors_are_named_and_counted(layout, tmp_path):
    if layout == "original":
        path = file = write_original(tmp_path / "m.safetensors", CONFIG)
        gone, bent = ("single_blocks.0.linear2.bias", "single_blocks.0.norm.key_norm.scale"), "img_in.bias"
    else:
        path = write_diffusers_folder(tmp_path / "m", CONFIG)
        file = path / "diffusion_pytorch_model.safetensors"
        gone, bent = ("proj_out.weight", "proj_out.bias"), "x_embedder.bias"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if key not in gone}, file)
    with pytest.raises(CheckpointError, match=rf"lacks 2 of \d+ tensors .*first {min(gone)}") as error:
        load_transformer(open_checkpoint(path), torch.float32, CPU)
    _assert_readable(error.value)
    save_file({**tensors, bent: torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=rf"1 tensors .*first {bent}: \(3,\) where .*\(256,\)"):
        load_transformer(open_checkpoint(path), torch.float32, CPU)


def test_a_fused_tensor_with_rows_to_spare_is_refused(tmp_path):
    path = _changed(tmp_path, single_blocks__0__linear1__weight=torch.ones(8 * 256, 256))
    with pytest.raises(CheckpointError, match=r"single_blocks.0.linear1.weight: \(2048, 256\) where .*\(1792, 256\)"):
        load_transformer(open_checkpoint(path), torch.float32, CPU)


def test_a_config_that_the_class_does_not_take_is_refused(tmp_path):
    folder = _with_config(write_diffusers_folder(tmp_path / "m", CONFIG), from_the_future=1)
    with pytest.raises(UnsupportedModelError, match="from_the_future"):
        load_transformer(open_checkpoint(folder), torch.float32, CPU)


def test_loading_stops_where_the_caller_cancels(tmp_path):
    class Cancelled(BaseException):
        pass

    def cancel():
        raise Cancelled

    checkpoint = open_checkpoint(write_original(tmp_path / "m.safetensors", CONFIG))
    with pytest.raises(Cancelled):
        load_transformer(checkpoint, torch.float32, CPU, cancel)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_identity_changes_when_a_file_is_replaced(kind, tmp_path):
    if kind == "file":
        path = changed = write_original(tmp_path / "m.safetensors", CONFIG)
    else:
        path = write_diffusers_folder(tmp_path / "m", CONFIG, shards=2)
        changed = path / "config.json"
    before = identity(path)
    assert open_checkpoint(path).identity == before == identity(path)
    os.utime(changed, ns=(1, 1))
    assert identity(path) != before


def test_opening_needs_neither_diffusers_nor_a_network(tmp_path):
    path = write_original(tmp_path / "m.safetensors", CONFIG)
    script = (
        "import sys; from parallel_runtime.loading.checkpoint import open_checkpoint;"
        "print(open_checkpoint(sys.argv[1]).spec.name, 'diffusers' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.split() == ["flux", "False"], done.stderr


def test_the_registry_finds_by_name_and_class_and_lists_what_it_has():
    assert find_by_name("flux") is find_by_transformer_class("FluxTransformer2DModel") is FLUX
    for find in (find_by_name, find_by_transformer_class):
        with pytest.raises(UnsupportedModelError, match=r"sdxl.*FLUX\.1"):
            find("sdxl")
