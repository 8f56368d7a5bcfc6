"""What ComfyUI learns of the pack: its nodes, and what happens at start."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .panel_server import serve_panel
from .parallel_config import ParallelConfigNode
from .parallel_doctor import ParallelDoctor
from .parallel_loaders import ParallelCheckpointLoader, ParallelLoader, ParallelVaeNode
from .parallel_sampler import ParallelSampler
from .start_setting import start_pool_if_wished


class ParallelExtension(ComfyExtension):
    _loaded = False

    async def on_load(self) -> None:
        """Add routes, and start the pool now, unless the last session did not use it or the artist set that."""
        if self._loaded:
            return
        self._loaded = True
        serve_panel()
        start_pool_if_wished()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        await self.on_load()  # which ComfyUI 0.8.0 declares and never calls
        return [
            ParallelConfigNode, ParallelLoader, ParallelCheckpointLoader, ParallelSampler, ParallelVaeNode,
            ParallelDoctor,
        ]  # fmt: skip
