"""What is measured: the rivals by name, and one measurement of one of them."""

from __future__ import annotations

from dataclasses import dataclass

PICTURE_STEPS = 28
"""Of a rival that is measured over a whole picture, as only that tells what a pipeline takes."""


@dataclass(frozen=True)
class Rival:
    """An engine with its settings.

    Args:
        title: in the table.
        module: of this package, whose `build` runs on every rank.
        compile: "" launches kernel by kernel, "blocks" compiles the repeated blocks, "whole" the transformer.
        split: of one picture over the ranks: "ulysses", "ring", "pipefusion", or "pipefusion-ulysses", which is both.
        least, most: numbers of GPUs that it can use, or that say anything about it.
        picture: whether it is measured over a picture of PICTURE_STEPS.
    """

    title: str
    module: str
    compile: str = ""
    split: str = "ulysses"
    least: int = 1
    most: int = 8
    picture: bool = False


RIVALS = {
    "ours": Rival("Parallel DiT, compiled", "ours", "blocks"),
    "ours-eager": Rival("Parallel DiT, eager", "ours"),
    "ours-picture": Rival("Parallel DiT, compiled, one whole picture", "ours", "blocks", picture=True),
    "ours-ring": Rival("Parallel DiT, compiled, ring", "ours", "blocks", "ring", least=2),
    "ours-pipefusion": Rival(
        "Parallel DiT, compiled, PipeFusion", "ours", "blocks", "pipefusion", least=2, picture=True
    ),
    "ours-pipefusion-ulysses": Rival(
        "Parallel DiT, compiled, 2 stages x Ulysses", "ours", "blocks", "pipefusion-ulysses", 4, picture=True
    ),
    "comfyui": Rival("ComfyUI's network, blocks compiled", "comfyui", "blocks", most=1),
    "comfyui-eager": Rival("ComfyUI's network, as it comes", "comfyui", most=1),
    "diffusers": Rival("diffusers, blocks compiled, Ulysses", "diffusers_parallel", "blocks"),
    "diffusers-eager": Rival("diffusers, eager, Ulysses", "diffusers_parallel"),
    "diffusers-ring": Rival("diffusers, blocks compiled, ring", "diffusers_parallel", "blocks", "ring", least=2),
    "xdit": Rival("xDiT, eager, Ulysses", "xdit", least=2),
    "xdit-compiled": Rival("xDiT, blocks compiled, Ulysses", "xdit", "blocks", least=2),
    "xdit-whole": Rival("xDiT, compiled as its runner does, Ulysses", "xdit", "whole", least=2),
    "xdit-pipefusion": Rival("xDiT, eager, PipeFusion", "xdit_pipefusion", split="pipefusion", least=2, picture=True),
}
REFERENCES = ("ours", "ours-picture")
"""Rivals that on one GPU give the latent with which all others of as many steps are compared."""


@dataclass(frozen=True)
class Case:
    """One measurement; its processes read it from case.json in their folder.

    Args:
        size: pixels along a side of the picture.
        steps: timed ones. 1000 x sigma should be whole in bfloat16, to which some rivals round it: 10 or 5 steps.
        warm: steps before them, which compile, and record graphs.
        compile, split: see `Rival`.
        tiny: a tiny model in float32 on CPUs.
        comfyui: ComfyUI's folder, "" where none was given.
        limit: seconds for all of it.
        p2p: whether GPUs may write to each other's memory; without, they exchange through the host's.
        extra: of less interest than those that are not.
    """

    rival: str
    ranks: int
    size: int
    steps: int
    warm: int
    compile: str
    tiny: bool
    comfyui: str
    limit: float
    split: str = "ulysses"
    p2p: bool = True
    extra: bool = False

    @property
    def pipelined(self) -> bool:
        """PipeFusion: keys and values are a step old, so its latent is another by design."""
        return self.split.startswith("pipefusion")

    @property
    def uses_host(self) -> bool:
        """Its GPUs exchange through the host's memory, so that whatever else used the host would slow it down."""
        return not self.p2p and self.ranks > 1

    @property
    def is_reference(self) -> bool:
        """Whether others are compared with it."""
        return self.rival in REFERENCES and self.ranks == 1
