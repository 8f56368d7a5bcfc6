"""Small workflow files, as ComfyUI's frontend saves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.template_coverage.node_types import Effect

NEVER, BYPASS = 2, 4
GRAPH_INPUT, GRAPH_OUTPUT = -10, -20
_Slot = tuple[int, int]


class Graph:
    """A workflow or a subgraph that grows node by node.

    Args:
        inputs: (name, type) of a subgraph's inputs.
        outputs: types of a subgraph's outputs.
    """

    def __init__(self, inputs: Sequence[tuple[str, str]] = (), outputs: Sequence[str] = ()):
        self.inputs = [{"name": name, "type": kind, "linkIds": []} for name, kind in inputs]
        self.outputs = [{"name": kind, "type": kind, "linkIds": []} for kind in outputs]
        self.nodes: list[dict[str, Any]] = []
        self.links: list[dict[str, Any]] = []

    def add(
        self,
        kind: str,
        gives: str = "",
        mode: int = 0,
        widgets: Sequence[Any] = (),
        wired: Sequence[str] = (),
        **inputs: tuple[str, _Slot | None],
    ) -> _Slot:
        """Add a node; returns its first output.

        Args:
            gives: types of its outputs.
            wired: names of inputs that are widgets, too.
            inputs: name -> (type, output that it is connected to).
        """
        number = len(self.nodes) + 1
        entries = []
        for index, (name, (of, origin)) in enumerate(inputs.items()):
            entry: dict[str, Any] = {"name": name, "type": of, "link": self._link(origin, (number, index), of)}
            entries.append(entry | ({"widget": {"name": name}} if name in wired else {}))
        outputs = [{"name": each, "type": each} for each in gives.split()]
        node = {"id": number, "type": kind, "mode": mode, "inputs": entries, "outputs": outputs}
        self.nodes.append(node | {"widgets_values": list(widgets), "properties": {}})
        return (number, 0)

    def give(self, slot: int, origin: _Slot) -> None:
        """Connect an output of the subgraph."""
        link = self._link(origin, (GRAPH_OUTPUT, slot), self.outputs[slot]["type"])
        self.outputs[slot]["linkIds"].append(link)

    def _link(self, origin: _Slot | None, target: _Slot, kind: str) -> int | None:
        if origin is None:
            return None
        number = len(self.links) + 1
        ends = {"origin_id": origin[0], "origin_slot": origin[1], "target_id": target[0], "target_slot": target[1]}
        self.links.append({"id": number, **ends, "type": kind})
        if origin[0] == GRAPH_INPUT:
            self.inputs[origin[1]]["linkIds"].append(number)
        return number

    def workflow(self, **subgraphs: Graph) -> dict[str, Any]:
        """As a file; names of subgraphs are types of nodes."""
        links = [
            [each["id"], each["origin_id"], each["origin_slot"], each["target_id"], each["target_slot"], each["type"]]
            for each in self.links
        ]
        definitions = [
            {"id": name, "name": name, "nodes": each.nodes, "links": each.links, "inputs": each.inputs}
            | {"outputs": each.outputs}
            for name, each in subgraphs.items()
        ]
        return {"nodes": self.nodes, "links": links, "definitions": {"subgraphs": definitions}}


def load(graph: Graph, file: str = "z_image_bf16.safetensors", dtype: str = "default", mode: int = 0) -> _Slot:
    """Load Diffusion Model."""
    return graph.add("UNETLoader", "MODEL", mode, widgets=[file, dtype])


SKIPS = "NodeOfAnotherPack"
SKIPPED = f"{SKIPS}: {Effect.WEIGHTS.value}"


def add_lora(graph: Graph, model: _Slot) -> _Slot:
    """A LoRA on a MODEL, which converts."""
    return graph.add("LoraLoaderModelOnly", "MODEL", widgets=["a.safetensors", 1.0], model=("MODEL", model))


def add_skip(graph: Graph, model: _Slot, scale: float = 1.0, mode: int = 0) -> _Slot:
    """Guidance by skipped blocks on a MODEL, which does not convert where it has a scale."""
    return graph.add(SKIPS, "MODEL", mode, ["9", "", scale], model=("MODEL", model))


def sample(graph: Graph, model: _Slot | None, mode: int = 0, latent: _Slot | None = None) -> _Slot:
    """KSampler; returns its latent."""
    inputs = {"model": ("MODEL", model), "latent_image": ("LATENT", latent)}
    return graph.add("KSampler", "LATENT", mode, **inputs)


def save(graph: Graph, latent: _Slot) -> None:
    """Decode and save."""
    image = graph.add("VAEDecode", "IMAGE", samples=("LATENT", latent))
    graph.add("SaveImage", images=("IMAGE", image))
