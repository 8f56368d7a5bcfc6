"""GGUF files without the pack that reads them: one sentence says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodes.model_files import find_gguf_pack, list_gguf_files, open_model_file
from parallel_runtime.errors import ConfigurationError, UnsupportedModelError
from parallel_runtime.loading.gguf_pack import open_pack


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "models" / "flux" / "tiny-Q8_0.GGUF"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF\x03\0\0\0")
    return path


def test_without_the_pack_the_error_names_it(file):
    with pytest.raises(UnsupportedModelError, match="a GGUF file, which ComfyUI reads with the pack ComfyUI-GGUF"):
        open_model_file(file)


def test_what_would_change_its_weights_is_refused(file):
    with pytest.raises(UnsupportedModelError, match="weights stay as they are: .*fp8_e5m2 does not take them"):
        open_model_file(file, "fp8_e5m2")


def test_files_are_listed_with_their_folders(file, tmp_path):
    (file.parent / "else.safetensors").touch()
    assert list_gguf_files([tmp_path / "models", tmp_path / "none"]) == ["flux/tiny-Q8_0.GGUF"]


def test_the_pack_is_where_its_node_is(file, monkeypatch):
    here = {"UnetLoaderGGUF": type("UnetLoaderGGUF", (), {"__module__": __name__})}
    monkeypatch.setitem(sys.modules, "nodes", SimpleNamespace(NODE_CLASS_MAPPINGS=here))
    assert find_gguf_pack(file) == str(Path(__file__).parent)


def test_a_host_without_the_pack_or_with_another_version_says_so(tmp_path):
    with pytest.raises(ConfigurationError, match="There is no ComfyUI-GGUF in .* on the host of this worker"):
        open_pack(str(tmp_path))
    (tmp_path / "loader.py").write_text("")
    (tmp_path / "ops.py").write_text("")
    with pytest.raises(ConfigurationError, match="gguf_sd_loader"):
        open_pack(str(tmp_path))
