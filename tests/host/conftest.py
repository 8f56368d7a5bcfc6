"""The session's ComfyUI."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_flux import tiny_config, write_diffusers_file, write_diffusers_folder, write_original

from .find_host import Host, NoHost, find_host
from .workflow import MODEL

_HOST = pytest.StashKey[Host]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a ComfyUI, leave one of the host tests, to be skipped with one line that says how to give one."""
    host_tests = [item for item in items if item.get_closest_marker("host")]
    if not host_tests:
        return
    try:
        if find_spec("websocket") is None:
            raise NoHost("the package websocket-client is not installed")
        config.stash[_HOST] = find_host()
    except NoHost as missing:
        host_tests[0].add_marker(pytest.mark.skip(reason=f"{len(host_tests)} host tests: {missing}"))
        config.hook.pytest_deselected(items=host_tests[1:])
        items[:] = [item for item in items if item not in host_tests[1:]]


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A running ComfyUI with the pack, the test pack and tiny models."""
    from .comfy_host import ComfyHost

    comfy = ComfyHost(pytestconfig.stash[_HOST], tmp_path_factory.mktemp("comfyui") / "base")
    try:
        write_models(comfy.base / "models")
        yield comfy
    finally:
        comfy.stop()


@pytest.fixture(scope="module")
def formats(host) -> Iterator[list[str]]:
    """Names of files of one model in every format that this ComfyUI has."""
    folder = host.base / "models" / "diffusion_models"
    script = Path(__file__).parents[1] / "comfyui_networks" / "formats.py"
    command = [host.host.python, str(script), str(host.host.path), str(folder / MODEL), str(folder)]
    environment = {**os.environ, "PYTHONPATH": host.host.python_path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = json.loads(done.stdout.splitlines()[-1])
    yield names
    for name in names:
        (folder / f"{name}.safetensors").unlink()


def write_models(models: Path) -> None:
    """Tiny models of every kind that the tests name."""
    files = models / "diffusion_models"
    whole = write_original(files / MODEL)
    write_original(files / "prefixed.safetensors", prefix="model.diffusion_model.", norm_key="weight")
    write_original(files / "plan.safetensors", seed=3)
    write_original(files / "bf16.safetensors", dtype=torch.bfloat16)
    write_original(files / "schnell.safetensors", config=tiny_config(guidance_embeds=False))
    write_original(files / "canny.safetensors", config=tiny_config(in_channels=128))
    write_diffusers_file(files / "diffusers.safetensors")
    write_diffusers_folder(models / "diffusers" / "tiny-pipeline", pipeline=True)
    (files / "truncated.safetensors").write_bytes(whole.read_bytes()[:-1000])
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, files / "vae.safetensors")
