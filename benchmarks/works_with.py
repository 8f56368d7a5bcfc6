"""Writes docs/works-with.md: what becomes of each node that takes a MODEL. python -m benchmarks.works_with"""

from __future__ import annotations

from pathlib import Path

from nodes.model_nodes import MODEL_NODES, How

PAGE = Path(__file__).parents[1] / "docs" / "works-with.md"
_HEAD = """# Works with

<!-- Made by `python -m benchmarks.works_with` of nodes/model_nodes.py; tests/nodes/test_model_nodes.py holds the table
against the ComfyUI that is present, and tests/host/test_model_nodes.py runs nodes beside Load Diffusion Model. -->

What ComfyUI's nodes that take a MODEL do with the one of Parallel Loader. With `network` on `auto` the loader goes on
with ComfyUI's own network where diffusers' class does not take what a node adds, and says so. What is refused stops
with a message that names the node; Load Diffusion Model still does what it did.

ControlNets (Load ControlNet Model, Apply ControlNet) run in ComfyUI's process as always, and their residuals travel to
the ranks with each step. One that is made of the model's weights (ControlLoRA, Stability's of SD3.5) gets
those of the file, and one that runs layers of the model (Qwen-Image Fun) runs them with those: ComfyUI's process reads
the file for that once, without what a LoRA adds.
"""


def write_page() -> str:
    """The page's text."""
    lines = [_HEAD]
    for how in How:
        named = {name: node for name, node in MODEL_NODES.items() if node.how is how}
        lines.append(f"## {how.value[0].upper()}{how.value[1:]}\n")
        if how is not How.REFUSED:
            lines.append(", ".join(f"`{name}`" for name in sorted(named)) + ".\n")
            continue
        lines.append("| Node | Why, or what to do |\n|---|---|")
        reasons = dict.fromkeys(node.why for node in named.values())
        for why in reasons:
            names = ", ".join(f"`{name}`" for name in sorted(named) if named[name].why == why)
            lines.append(f"| {names} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
