"""Parallel Config: the artist's wishes for the split, as a socket."""

from __future__ import annotations

from comfy_api.latest import io

from parallel_runtime.config import ATTENTION_BACKENDS, ParallelConfig

ConfigSocket = io.Custom("PARALLEL_CONFIG")

DEGREES = ("auto", "1", "2", "3", "4", "6", "8")
CFG_DEGREES = ("auto", "1", "2")


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
                    "Must divide the model's head count (24 for FLUX.1).",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION_BACKENDS),
                    default="auto",
                    tooltip="Attention kernel in the ranks. Auto takes PyTorch's fastest; the choice changes speed, "
                    "and the result only by rounding.",
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
            ],
            outputs=[ConfigSocket.Output(display_name="config", tooltip="For Parallel Loader.")],
        )

    @classmethod
    def execute(
        cls, devices: str, cfg: str, data: str, ulysses: str, attention: str, compile: bool, hosts: int = 1
    ) -> io.NodeOutput:
        """Check the values and pass them on.

        Raises:
            ConfigurationError: they cannot hold.
        """
        config = ParallelConfig(
            devices=devices.strip(),
            data=read_degree(data),
            cfg=read_degree(cfg),
            ulysses=read_degree(ulysses),
            attention=attention,
            compile=compile,
            hosts=hosts,
        )
        return io.NodeOutput(config.to_mapping())
