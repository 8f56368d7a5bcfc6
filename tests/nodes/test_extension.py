"""Routes and the start setting come once, whether ComfyUI calls on_load before it asks for nodes, as 0.33, or never."""

from __future__ import annotations

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

SIBLINGS = {
    "serve_panel": "panel_server",
    "start_pool_if_wished": "start_setting",
    "ParallelConfigNode": "parallel_config",
    "ParallelLoader": "parallel_loaders",
    "ParallelCheckpointLoader": "parallel_loaders",
    "ParallelSampler": "parallel_sampler",
    "ParallelVaeNode": "parallel_loaders",
    "ParallelDoctor": "parallel_doctor",
}


@pytest.fixture
def extension(monkeypatch):
    """nodes/extension.py among stand-ins that note calls, and the list of what was called."""
    called: list[str] = []
    latest = ModuleType("comfy_api.latest")
    latest.ComfyExtension, latest.io = object, SimpleNamespace(ComfyNode=object)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy_api", ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    stand_ins = {module: ModuleType(f"nodes.{module}") for module in SIBLINGS.values()}
    for name, module in SIBLINGS.items():
        made = (lambda name=name: called.append(name)) if name.islower() else type(name, (), {})
        setattr(stand_ins[module], name, made)
        monkeypatch.setitem(sys.modules, f"nodes.{module}", stand_ins[module])
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

    assert [node.__name__ for node in asyncio.run(start())] == [name for name in SIBLINGS if not name.islower()]
    assert called == ["serve_panel", "start_pool_if_wished"]
