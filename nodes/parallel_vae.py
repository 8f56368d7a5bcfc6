"""Parallel VAE: the VAE of any loader, run on all GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from comfy_api.latest import io

from .node_text import failing_shown, make_schema, notices_on_running_node, show_text
from .panel.settings import wished_config
from .parallel_config import ConfigSocket


class ParallelVaeNode(io.ComfyNode):
    """The workers load the file when a node encodes or decodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="ParallelVAE",
            display_name="Parallel VAE",
            description="Encodes and decodes on several GPUs at once: VAE Decode and VAE Encode after this node stay "
            "as they are. Takes the VAE of Load VAE or of a checkpoint loader.",
            search_aliases=["vae", "vae decode", "vae encode", "multi gpu", "parallel"],
            inputs=[
                io.Vae.Input("vae", tooltip="A VAE of Load VAE, or of a checkpoint loader."),
                ConfigSocket.Input("parallel_config", optional=True, tooltip="Which GPUs. Without one, all of them."),
            ],
            outputs=[io.Vae.Output(tooltip="An ordinary VAE, for VAE Decode, VAE Encode or any other.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @failing_shown()
    def execute(cls, vae: Any, parallel_config: Mapping[str, Any] | None = None) -> io.NodeOutput:
        """Make the VAE object. Raises RequestError for one that is of no file, ConfigurationError for its devices."""
        # Imported here and not at the top: ComfyUI's start shall not pay for it.
        from workers.client.pool_registry import get_pool
        from workers.launch import resolve_devices

        from .remote_vae import ParallelVae, RemoteVae, describe

        config = wished_config(parallel_config)
        ranks = resolve_devices(config, torch.cuda.device_count).world_size
        remote = RemoteVae(vae, config, get_pool, ranks, notices_on_running_node("VAE"))
        return io.NodeOutput(ParallelVae(remote), ui=show_text(cls.hidden.unique_id, describe(remote)))
