"""A custom node pack for measurements: a text that no encoder saw, and the moments at which things happened.

Moments are `time.monotonic()`, the same clock for every process of a machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.nested_tensor
import comfy.utils
import torch
from aiohttp import web
from comfy_api.latest import ComfyExtension, io
from comfy_execution.utils import get_executing_context
from server import PromptServer

EVENTS: dict[str, list[dict[str, Any]]] = {}
"""Prompt id -> what happened in it, in order."""


def note(kind: str, **values: Any) -> None:
    """Write down a moment of the node that is running."""
    context = get_executing_context()
    if context is not None:
        moment = {"kind": kind, "time": time.monotonic(), "node": context.node_id, **values}
        EVENTS.setdefault(context.prompt_id, []).append(moment)


def follow_progress() -> None:
    """Note every step of every sampler: ComfyUI's messages to the browser leave some out."""
    shown = comfy.utils.ProgressBar.update_absolute

    def update_absolute(self, value, total=None, preview=None):
        note("step", value=value, preview=preview is not None)
        return shown(self, value, total, preview)

    comfy.utils.ProgressBar.update_absolute = update_absolute


class RandomText(io.ComfyNode):
    """CONDITIONING of any size, from a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BenchmarkText",
            category="benchmark",
            inputs=[
                io.Int.Input("seed"),
                io.Int.Input("length"),
                io.Int.Input("width"),
                io.Int.Input("pooled"),
                io.Float.Input("guidance"),
                io.Int.Input("again", default=0, tooltip="Another number, and ComfyUI makes the same text anew."),
                io.Conditioning.Input("encoded", optional=True, tooltip="What this stands for: it is made, and left."),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls, seed: int, length: int, width: int, pooled: int, guidance: float, again: int, encoded: Any = None
    ) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, length, width, generator=generator)
        extras: dict[str, Any] = {}
        if pooled:
            extras["pooled_output"] = torch.randn(1, pooled, generator=generator)
        if guidance:
            extras["guidance"] = guidance
        return io.NodeOutput([[text, extras]])


class Latents(io.ComfyNode):
    """Empty latents of any shapes, sampled together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BenchmarkLatents",
            category="benchmark",
            inputs=[io.String.Input("shapes", tooltip="JSON: a list of shapes.")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, shapes: str) -> io.NodeOutput:
        made = [torch.zeros(shape) for shape in json.loads(shapes)]
        return io.NodeOutput({"samples": comfy.nested_tensor.NestedTensor(made)})


class Mark(io.ComfyNode):
    """Passes a latent on, several as one row, and notes when it was there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BenchmarkMark",
            category="benchmark",
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any]) -> io.NodeOutput:
        note("mark")
        latent = samples["samples"]
        if getattr(latent, "is_nested", False):
            samples = {"samples": comfy.utils.pack_latents(latent.unbind())[0]}
        return io.NodeOutput(samples)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same, which notes how long it took, a GPU's work included."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        done = function(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        return done

    return call


PICTURES: dict[str, torch.Tensor] = {}
"""What was decoded first, by the latent's shape."""


class Decode(io.ComfyNode):
    """Decodes noise again and again, as VAE Decode does, and notes the seconds, those in the network, and the distance
    from what was decoded first of this shape."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BenchmarkDecode",
            category="benchmark",
            inputs=[io.Vae.Input("vae"), io.String.Input("shape", tooltip="JSON."), io.Int.Input("times")],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, vae: Any, shape: str, times: int) -> io.NodeOutput:
        latent = torch.randn(json.loads(shape), generator=torch.Generator().manual_seed(5))
        seconds, in_network = list[float](), list[float]()
        network = vae.first_stage_model
        decode = timed(network.decode, in_network)
        with mock.patch.object(network, "decode", decode):
            for _ in range(times):
                picture: Any = None  # else the last one is let go inside of the time
                picture = timed(vae.decode, seconds)(latent)
        first = PICTURES.setdefault(shape, picture)
        distance = float((picture - first).norm() / first.norm())
        note("decoded", seconds=seconds, in_network=in_network, distance=distance)
        return io.NodeOutput()


class Looked(io.ComfyNode):
    """A MODEL with a function after guidance that no rank can have, as some pack's node might set: it goes by steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BenchmarkLooked",
            category="benchmark",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        looked = model.clone()
        looked.set_model_sampler_post_cfg_function(lambda seen: seen["denoised"])
        return io.NodeOutput(looked)


@PromptServer.instance.routes.get("/benchmark/events/{prompt}")
async def events(request: web.Request) -> web.Response:
    """What happened in a prompt."""
    return web.json_response(EVENTS.get(request.match_info["prompt"], []))


class BenchmarkPack(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        follow_progress()
        return [RandomText, Latents, Mark, Decode, Looked]


def comfy_entrypoint() -> BenchmarkPack:
    return BenchmarkPack()
