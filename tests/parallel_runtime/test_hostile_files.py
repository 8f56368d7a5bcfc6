"""Whatever a model file or a path holds, ComfyUI's own process refuses it in a bounded time, in a typed error."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, ConfigurationError, ParallelError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.files import identity
from parallel_runtime.loading.header import check_host_header
from workers.wire.protocol import describe

SECONDS = 20.0  # of CPU, where none takes one on an idle core; without the bounds each takes minutes


BYTES = 1 << 30  # of memory, where none takes a quarter; read whole, or made as asked, each takes more than there is
STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_of_process(name: str) -> int:
    return next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


@pytest.fixture(autouse=True)
def bounded():
    """Every test here is one of time and of memory as well."""
    with contextlib.suppress(OSError):  # a sandbox may not let it: then the peak is that of this process so far
        PEAK.write_text("5")
    before, started = memory_of_process("VmHWM"), time.process_time()
    yield
    assert time.process_time() - started < SECONDS
    assert memory_of_process("VmHWM") - before < BYTES


def write_header(path: Path, text: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def write_keys(path: Path, keys: Iterable[str]) -> Path:
    """Tensors without a byte, under these names."""
    entry = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    return write_header(path, json.dumps(dict.fromkeys(keys, entry)).encode())


def write_folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(text)
    write_keys(path / "diffusion_pytorch_model.safetensors", ["x_embedder.weight"])
    return path


def in_folder(path: Path) -> Path:
    """A diffusers folder with this file."""
    folder = path.parent / "FLUX"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    return path.rename(folder / "diffusion_pytorch_model.safetensors").parent


def refuse(path: str | Path) -> str:
    """What is said of a path; a file is looked at as that of a diffusers folder."""
    if isinstance(path, Path) and path.is_file():
        path = in_folder(path)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


def test_a_name_of_a_megabyte_is_refused_in_a_short_message(tmp_path):
    says = refuse(write_keys(tmp_path / "m.safetensors", ["x" * 1_200_000]))
    assert "the name of a tensor has 1200000 characters" in says


def test_more_tensors_than_any_model_has_are_refused(tmp_path):
    says = refuse(write_keys(tmp_path / "m.safetensors", map(str, range(100_000))))
    assert "it lists 100000 tensors" in says


@pytest.mark.parametrize(
    "keys",
    [
        [f"{'lora_lokr_w.' * 30}{number}" for number in range(10_000)],
        [f"down_blocks.{number}.resnets.{number}.conv1.weight" for number in range(10_000)],
        [f"input_blocks.{number}.0.op.weight" for number in range(10_000)],
        ["down_blocks.999999999.resnets.999999999.x", "up_blocks.999999999.resnets.999999999.x"],
        ["blocks.999999999.cross_attn.norm_k.weight", "double_blocks.999999999.x", "joint_blocks.999999999.x"],
        ["double_blocks.\u00b2.x", "double_blocks." + "9" * 480 + ".x"],
    ],
    ids=["expressions", "levels", "inputs", "a billion levels", "a billion blocks", "no numbers"],
)
def test_names_that_were_made_to_take_long_do_not(tmp_path, keys):
    with contextlib.suppress(CheckpointError, UnsupportedModelError):
        open_checkpoint(in_folder(write_keys(tmp_path / "m.safetensors", keys)))


@pytest.mark.parametrize("number", ["1e400", "1e5", "-1", "1.0", '"1"', "true", "null", "9" * 4000, "9" * 5000, "[1]"])
@pytest.mark.parametrize("place", ["shape", "data_offsets"])
def test_a_size_that_is_no_size_is_refused(tmp_path, number, place):
    other = {"shape": "data_offsets", "data_offsets": "shape"}[place]
    text = f'{{"x": {{"dtype": "F32", "{place}": [{number}, {number}], "{other}": [0, 0]}}}}'
    refuse(write_header(tmp_path / "m.safetensors", text.encode()))


NO_CONFIGS = ['{"transformer": 3}', "[]", "null", "flux-dev", '{"vae": {"layers": 1e9}}', "{" * 100_000]


def test_a_headers_config_and_the_names_of_blocks_ask_comfyui_for_nothing_that_no_model_has(tmp_path):
    path = tmp_path / "m.safetensors"
    real = {"num_layers": 48, "cross_attention_dim": 4096, "norm_eps": 1e-6, "positions": [20, 2048], "rope": "split"}
    check_host_header(path, ["blocks.59.x", "mlp.experts.255.weight"], {"config": json.dumps({"transformer": real})})
    for config in NO_CONFIGS:  # which most families do not look at
        check_host_header(path, [], {"config": config})
    for wrong in ({"num_layers": 10**9}, {"vae": {"depth": 300}}, {"dim": 1e300}, {"heads": [1, 10**12]}):
        with pytest.raises(CheckpointError, match="at most .* can be"):
            check_host_header(path, [], {"config": json.dumps({"transformer": wrong})})
    with pytest.raises(CheckpointError, match="no model counts further"):
        check_host_header(path, map("blocks.{}.x".format, range(30_000)), {})


def test_deep_json_is_refused(tmp_path):
    refuse(write_header(tmp_path / "m.safetensors", b'{"x":' + b"[" * 200_000))
    refuse(write_folder(tmp_path / "folder", '{"x":' + "[" * 200_000))


@pytest.mark.parametrize(
    "setting",
    [
        '"num_layers": 1000000000',
        '"num_single_layers": 513',
        '"num_layers": 2',
        '"transformer_layers_per_block": [1, [1000000000]]',
        '"sample_size": 1000000',
        '"num_attention_heads": 1000000000000',
        '"guidance_embeds": 1e400',
        '"axes_dims_rope": [NaN]',
        '"in_channels": -Infinity',
        f'"axes_dims_rope": [{"1," * 5000}1]',
        f'"in_channels": {"9" * 5000}',
    ],
)
def test_a_written_config_asks_for_nothing_that_no_model_has(tmp_path, setting):
    text = f'{{"_class_name": "FluxTransformer2DModel", {setting}}}'
    says = refuse(write_folder(tmp_path / "folder", text))
    assert "config.json" in says


def test_a_config_as_large_as_a_model_is_not_read_whole(tmp_path):
    path = write_folder(tmp_path / "folder", "{}")
    with (path / "config.json").open("wb") as file:
        file.truncate(1 << 36)
    assert "it has more than" in refuse(path)


@pytest.mark.parametrize(
    "path", ["/nowhere/" + "x" * 300, "/" + "x/" * 3000, "/no\udcff.safetensors", "a\0b", "~nobody_of_this_name/x", ""]
)
def test_a_path_that_is_none_is_refused(path):
    assert refuse(path or "/nowhere").encode()


def test_a_file_whose_name_is_no_utf_8_is_refused(tmp_path):
    name = os.fsencode(tmp_path) + b"/m\xff.safetensors"
    write_keys(Path(os.fsdecode(name)), ["x"])
    assert "is not UTF-8" in refuse(os.fsdecode(name))


def test_another_file_of_the_same_size_and_time_is_another_file(tmp_path):
    path, other = tmp_path / "m.safetensors", tmp_path / "other"
    for file in (path, other):
        file.write_bytes(b"x")
        os.utime(file, (1, 1))
    before = identity(path)
    other.replace(path)
    assert identity(path) != before


@pytest.mark.parametrize("text", ["x" * 10**6, "\udcff", "a\nb"])
def test_an_error_fits_into_a_frame_whatever_is_in_it(text):
    for error in (RuntimeError(text), CheckpointError(text, text)):
        info = describe(error, 0, text)
        assert len(info.cause.encode()) + len(info.fix.encode()) + len(info.traceback.encode()) < 1 << 19


HUGE: list[tuple[dict[str, Any], str]] = [
    ({"devices": "cpu:100000000"}, "is not understood"),
    ({"devices": "cpu:65"}, "asks for more than 64 processes on the CPU"),
    ({"devices": "9" * 5000}, "is not understood"),
    ({"devices": "0," + "9" * 5000}, "is not understood"),
    ({"devices": "\u0663"}, "is not understood"),
    ({"ulysses": 10**5000}, "ulysses is a number over 10000"),
    ({"data": float("nan")}, "data is nan"),
    ({"patches": 10**9}, "patches is a number over"),
    ({"warmup_steps": 10**9}, "warmup_steps is a number over"),
    ({"hosts": 10**9}, "hosts is a number over"),
]


@pytest.mark.parametrize(("values", "says"), HUGE)
def test_every_number_of_a_configuration_has_a_bound(values, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        ParallelConfig.from_mapping(values)
    assert len(str(caught.value)) < 300
    assert isinstance(caught.value, ParallelError)


@pytest.mark.parametrize("metadata", ["a text", ["format", "pt"], 7, {"format": {"pt": 1}}, {"format": 1}])
def test_metadata_that_is_no_text_by_name_is_a_damaged_header(tmp_path, metadata):
    header = {"__metadata__": metadata, "x": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}
    assert "damaged header" in refuse(write_header(tmp_path / "model.safetensors", json.dumps(header).encode()))


def test_a_tensor_whose_name_is_half_a_character_is_a_damaged_header(tmp_path):
    assert "damaged header" in refuse(write_keys(tmp_path / "model.safetensors", ["x_embedder\ud800.weight"]))


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a\0.safetensors", "../a.safetensors", 7, None])
def test_an_index_of_files_that_cannot_be_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    assert ("is not valid JSON" if name == "\ud800.safetensors" else "does not list the files") in refuse(folder)


def test_of_what_a_link_leads_to_nothing_is_shown(tmp_path):
    (tmp_path / "secret").write_text("hunter2, and more than a header's length")
    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / "secret")
    said = refuse(link)
    assert "no safetensors file" in said
    assert "hunter" not in said
