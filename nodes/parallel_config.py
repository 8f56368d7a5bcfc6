"""Parallel Config: the artist's wishes for the split, as a socket."""

from __future__ import annotations

from comfy_api.latest import io

from parallel_runtime.config import ATTENTION_BACKENDS, ParallelConfig
from parallel_runtime.errors import ConfigurationError

from .node_text import show_text

ConfigSocket = io.Custom("PARALLEL_CONFIG")

DEGREES = ("auto", "1", "2", "3", "4", "6", "8")
CFG_DEGREES = ("auto", "1", "2")
PATCHES = ("auto", "1", "2", "3", "4", "6", "8", "12", "16")


def read_degree(text: str) -> int | None:
    """Number of a degree's menu entry; None for auto."""
    return None if text == "auto" else int(text)


class ParallelConfigNode(io.ComfyNode):
    """Outputs `ParallelConfig.to_mapping()`: plain data, so that it travels and is compared like any value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs, outputs and texts of the node."""
        return io.Schema(
            node_id="ParallelConfig",
            display_name="Parallel Config",
            category="parallel",
            description="How a model is split over the GPUs. Leave everything on auto, or connect no config at all: "
            "the split is then chosen from the model, the picture and the devices.",
            search_aliases=["multi gpu", "devices", "ulysses", "parallel"],
            inputs=[
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="Which GPUs take part: auto for all that ComfyUI sees, numbers such as 0,1, "
                    "or cpu:2 for two ranks on the CPU.",
                ),
                io.Combo.Input(
                    "cfg",
                    options=list(CFG_DEGREES),
                    default="auto",
                    tooltip="2 computes the positive and the negative prompt at the same time, on different GPUs. "
                    "Helps only where CFG is above 1.",
                ),
                io.Combo.Input(
                    "data",
                    options=list(DEGREES),
                    default="auto",
                    tooltip="Spreads the pictures of a batch over this many groups of GPUs.",
                ),
                io.Combo.Input(
                    "ulysses",
                    options=list(DEGREES),
                    default="auto",
                    tooltip="Splits one picture over this many GPUs: each computes a part of the attention heads. "
                    "At most the model's head count (24 for FLUX.1).",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION_BACKENDS),
                    default="auto",
                    tooltip="Attention kernel in the ranks. Auto measures which is the fastest on your GPU. The choice "
                    "changes speed, and the result only by rounding; sage changes it slightly more.",
                ),
                io.Boolean.Input(
                    "compile",
                    default=False,
                    tooltip="Compiles the model's blocks with torch.compile: the first picture of a size takes "
                    "longer, the next ones less.",
                ),
                io.Int.Input(
                    "hosts",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    tooltip="How many machines take part. Above 1, start the join command on each other machine first; "
                    "the help page shows it.",
                ),
                io.Combo.Input(
                    "ring",
                    options=list(DEGREES),
                    default="auto",
                    optional=True,
                    tooltip="Splits one picture over this many GPUs that pass parts of it round. Helps where there are "
                    "more GPUs than attention heads, or links that Ulysses keeps waiting.",
                ),
                io.Combo.Input(
                    "stages",
                    options=list(DEGREES),
                    default="auto",
                    optional=True,
                    tooltip="PipeFusion: cuts the model into this many parts, each on its own GPU. Changes the picture "
                    "slightly; for GPUs joined by slow links or too small for the model.",
                ),
                io.Combo.Input(
                    "patches",
                    options=list(PATCHES),
                    default="auto",
                    optional=True,
                    tooltip="Parts of the picture that travel through the stages one behind the other; auto: as many "
                    "as stages. More of them change the picture more. Without stages, nothing.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=1,
                    min=1,
                    max=100,
                    optional=True,
                    tooltip="How many steps the stages first compute exactly. More of them are slower and closer to "
                    "the picture of one GPU. Without stages, nothing.",
                ),
            ],
            outputs=[ConfigSocket.Output(display_name="config", tooltip="For Parallel Loader.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        devices: str,
        cfg: str,
        data: str,
        ulysses: str,
        attention: str,
        compile: bool,
        hosts: int = 1,
        ring: str = "auto",
        stages: str = "auto",
        patches: str = "auto",
        warmup_steps: int = 1,
    ) -> io.NodeOutput:
        """Check the values, pass them on, and show the plan that they give for FLUX.1.

        Raises:
            ConfigurationError: they cannot hold.
        """
        config = ParallelConfig(
            devices=devices.strip(),
            data=read_degree(data),
            cfg=read_degree(cfg),
            pipe=read_degree(stages),
            ring=read_degree(ring),
            ulysses=read_degree(ulysses),
            patches=read_degree(patches),
            warmup_steps=warmup_steps,
            attention=attention,
            compile=compile,
            hosts=hosts,
        )
        return io.NodeOutput(config.to_mapping(), ui=show_text(cls.hidden.unique_id, preview(config)))


def preview(config: ParallelConfig) -> str:
    """Return what the configuration would do with FLUX.1 on these devices; what is wrong is told, and not raised.

    The nodes that use the configuration raise: a model that is not FLUX.1 may take what FLUX.1 refuses.
    """
    # Imported here and not at the top: ComfyUI's start shall not pay for it.
    import torch

    from parallel_runtime.planning.explanation import explain
    from parallel_runtime.planning.facts import FLUX_DEV, flux_request
    from workers.gpus import find_machine
    from workers.launch import resolve_devices

    try:
        spec = resolve_devices(config, torch.cuda.device_count)
        text = explain(config, spec.world_size, FLUX_DEV, flux_request(1024), find_machine(spec))
    except ConfigurationError as error:
        return str(error)
    return f"FLUX.1 dev, 1024 × 1024: {text}"
