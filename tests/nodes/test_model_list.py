"""Diffusers folders are found below ComfyUI's model folders, and found again by name."""

from __future__ import annotations

from pathlib import Path

from nodes.model_files import find_folder, list_folders


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


def test_links_that_lead_back_are_not_followed_for_ever_and_others_are(tmp_path):
    root = tmp_path / "models"
    make_files(root, "flux/transformer/config.json", "deep/er/note")
    make_files(tmp_path / "elsewhere", "wan/transformer/config.json")
    for number in range(3):  # of which each level has as many: 3 ** 40 folders
        (root / "deep" / "er" / f"up {number}").symlink_to(root)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert list_folders([root]) == ["flux/", "linked/wan/"]


def test_names_that_lead_out_of_the_models_are_none(tmp_path):
    make_files(tmp_path, "secret/transformer/config.json", "models/flux/transformer/config.json")
    for name in (f"{tmp_path}/secret/", "../secret/", "flux/../../secret/"):
        assert find_folder(name, [tmp_path / "models"]) is None
