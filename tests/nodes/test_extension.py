"""Routes and the start setting come once, whether ComfyUI calls on_load before it asks for nodes, as 0.33, or never."""

from __future__ import annotations

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

SIBLINGS = {
    "panel_server": "serve_panel",
    "start_setting": "start_pool_if_wished",
    "parallel_config": "ParallelConfigNode",
    "parallel_loader": "ParallelLoader",
    "parallel_checkpoint_loader": "ParallelCheckpointLoader",
    "parallel_sampler": "ParallelSampler",
    "parallel_doctor": "ParallelDoctor",
}


@pytest.fixture
def extension(monkeypatch):
    """nodes/extension.py among stand-ins that note calls, and the list of what was called."""
    called: list[str] = []
    latest = ModuleType("comfy_api.latest")
    latest.ComfyExtension, latest.io = object, SimpleNamespace(ComfyNode=object)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy_api", ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    for module, name in SIBLINGS.items():
        stand_in = ModuleType(f"nodes.{module}")
        setattr(stand_in, name, (lambda name=name: called.append(name)) if name.islower() else type(name, (), {}))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, "nodes.extension", raising=False)
    yield importlib.import_module("nodes.extension").ParallelExtension(), called
    sys.modules.pop("nodes.extension", None)


@pytest.mark.parametrize("calls_on_load", [True, False])
def test_panel_and_start_come_once_with_the_nodes(extension, calls_on_load):
    made, called = extension

    async def start() -> list[type]:
        if calls_on_load:
            await made.on_load()
            assert called == ["serve_panel", "start_pool_if_wished"]
        return await made.get_node_list()

    assert [node.__name__ for node in asyncio.run(start())] == [
        name for name in SIBLINGS.values() if not name.islower()
    ]
    assert called == ["serve_panel", "start_pool_if_wished"]
