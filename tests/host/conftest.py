"""The session's ComfyUI."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.comfyui_networks.formats import FORMATS

from .find_host import Host, NoHost, find_host
from .workflow import MODEL

_HOST = pytest.StashKey[Host]()
_RUNNING = pytest.StashKey[Any]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a ComfyUI, leave one of the host tests, to be skipped with one line that says how to give one.

    Those of GPUs need no server, only its code, which may lie on a GPU machine without all of its packages.
    """
    host_tests = [item for item in items if item.get_closest_marker("host") and not item.get_closest_marker("gpu")]
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
    from .host_models import write_models

    comfy = ComfyHost(pytestconfig.stash[_HOST], tmp_path_factory.mktemp("comfyui") / "base")
    try:
        write_models(comfy)
        pytestconfig.stash[_RUNNING] = comfy
        yield comfy
    finally:
        comfy.stop()


@pytest.fixture(autouse=True, scope="module")
def left_light(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the ComfyUI of the session without models: three of them, and their pools, share a machine of tests."""
    yield
    comfy = request.config.stash.get(_RUNNING, None)
    if comfy is not None and comfy.process.poll() is None:
        comfy.post("/parallel_dit/unload")  # also those whose MODEL ComfyUI has let go
        # ComfyUI's thread must not be busy with an earlier one, or it hears of this after the next prompt, whose nodes
        # would not be cached then; nor may that prompt come before it has woken up.
        time.sleep(1)
        comfy.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1)


@pytest.fixture(scope="module")
def has_format(host) -> Iterator[Callable[[str], bool]]:
    """Whether this ComfyUI has a format of quantised weights; a file of the tests' model in it is there then."""
    from .small_files import run_beside

    folder = host.base / "models" / "diffusion_models"

    @functools.cache
    def write(name: str) -> bool:
        written = run_beside(host, "formats", host.host.path, folder / MODEL, folder, name)
        return json.loads(written.splitlines()[-1]) == [name]

    yield write
    for name in FORMATS:
        (folder / f"{name}.safetensors").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def gguf(host) -> Iterator[None]:
    """GGUF files of one model, and the pack that reads them."""
    from .small_files import write_gguf_files

    if "UnetLoaderGGUF" not in host.get("/object_info"):
        pytest.skip("ComfyUI-GGUF is not there: set COMFYUI_GGUF_PATH to it, and install its package gguf")
    host.needs_small_flux()
    files = write_gguf_files(host)
    yield
    for file in files:
        file.unlink()
