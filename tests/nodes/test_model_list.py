"""Diffusers folders are found below ComfyUI's model folders, and found again by name."""

from __future__ import annotations

from pathlib import Path

from nodes.model_list import find_folder, list_folders


def make_files(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_pipelines_and_transformer_folders_are_listed_and_nothing_else(tmp_path):
    one, other = tmp_path / "diffusers", tmp_path / "diffusion_models"
    make_files(
        one, "flux/model_index.json", "flux/transformer/config.json", "flux/vae/config.json", "flux/vae/a.safetensors"
    )
    make_files(other, "deep/er/config.json", "deep/er/model.safetensors", "single.safetensors", "text/config.json")
    assert list_folders([one, other, tmp_path / "missing"]) == ["deep/er/", "flux/"]
    assert find_folder("flux/", [other, one]) == one / "flux"
    assert find_folder("gone/", [one, other]) is None


def test_a_folder_with_sharded_weights_counts(tmp_path):
    make_files(tmp_path, "dev/config.json", "dev/diffusion_pytorch_model.safetensors.index.json")
    assert list_folders([tmp_path]) == ["dev/"]


def test_a_root_that_is_a_transformer_folder_itself_does_not_hide_what_is_below(tmp_path):
    make_files(tmp_path, "config.json", "model.safetensors", "below/transformer/config.json")
    assert list_folders([tmp_path]) == ["below/"]
