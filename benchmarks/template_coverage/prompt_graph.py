"""A workflow file as the nodes that a server would run: subgraphs opened, muted and bypassed nodes resolved.

Follows what ComfyUI's frontend 1.49 does when it serialises a workflow (graphToPrompt, ExecutableNodeDTO).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

_NEVER, _BYPASS = 2, 4
_GRAPH_INPUT, _GRAPH_OUTPUT = -10, -20
_ANY = ("*", "", 0)
VIRTUAL = frozenset({"Reroute", "PrimitiveNode", "Note", "MarkdownNote"})
"""Nodes that exist in the frontend alone."""

Path = tuple[int, ...]
"""Ids of the subgraph nodes around a node, and its own."""


class Output(NamedTuple):
    """An output of a node that runs."""

    node: Path
    slot: int


@dataclass(frozen=True)
class Node:
    """A node that runs.

    Args:
        kind: its type.
        links: input -> the output that it is connected to.
        types: input -> type as its node declares it.
        widgets: input -> value, for nodes of WIDGETS; of a promoted widget the outer value.
        outputs: types, by slot.
        saved: all its widgets' values as the file has them, in the order of the node's widgets or by name.
        promoted: input -> value of a promoted widget.
    """

    path: Path
    kind: str
    title: str
    links: Mapping[str, Output] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    widgets: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    saved: Sequence[Any] | Mapping[str, Any] = ()
    promoted: Mapping[str, Any] = field(default_factory=dict)


class _Value(NamedTuple):
    """A widget's value that stands in for a link."""

    value: Any


def read_prompt(workflow: Mapping[str, Any]) -> dict[Path, Node]:
    """The nodes of a workflow that a server gets, by path.

    Raises:
        ValueError: the workflow contains a subgraph that contains itself.
    """
    return _Prompt(workflow).nodes()


class _Graph:
    """A workflow or the definition of a subgraph."""

    def __init__(self, data: Mapping[str, Any]):
        self.data = data
        self.nodes: dict[int, Mapping[str, Any]] = {node["id"]: node for node in data["nodes"]}
        self.links = {link[0]: link for link in map(_link, data.get("links") or ())}
        self.inputs: Sequence[Mapping[str, Any]] = data.get("inputs") or ()
        self.outputs: Sequence[Mapping[str, Any]] = data.get("outputs") or ()

    def promoted(self) -> list[str]:
        """Names of inputs that stand for a widget inside, in the order of the outer node's values."""
        names = []
        for given in self.inputs:
            for link in map(self.links.get, given.get("linkIds") or ()):
                target = self.nodes.get(link[3]) if link else None
                entries = (target or {}).get("inputs") or ()
                if link and link[4] < len(entries) and entries[link[4]].get("widget"):
                    names.append(given["name"])
                    break
        return names


def _link(link: Any) -> tuple[int, int, int, int, int]:
    """(id, origin, slot there, target, slot there); a workflow has lists, a subgraph mappings."""
    if isinstance(link, Mapping):
        return (link["id"], link["origin_id"], link["origin_slot"], link["target_id"], link["target_slot"])
    return (link[0], link[1], link[2], link[3], link[4])


class _Prompt:
    def __init__(self, workflow: Mapping[str, Any]):
        self._root = _Graph(workflow)
        definitions = workflow.get("definitions", {}).get("subgraphs", ())
        self._subgraphs = {each["id"]: _Graph(each) for each in definitions}
        self._places: dict[Path, tuple[_Graph, Mapping[str, Any]]] = {}
        for node in self._root.nodes.values():
            # Of subgraph nodes inside of others the frontend does not ask whether they are muted.
            self._open(self._root, node, (), inside=node.get("mode") not in (_NEVER, _BYPASS))

    def _open(
        self, graph: _Graph, node: Mapping[str, Any], outer: Path, inside: bool, seen: tuple[str, ...] = ()
    ) -> None:
        path = (*outer, node["id"])
        self._places[path] = (graph, node)
        inner = self._subgraphs.get(node["type"])
        if inner is None or not inside:
            return
        if node["type"] in seen:
            raise ValueError(f"subgraph {node['type']} contains itself")
        for each in inner.nodes.values():
            self._open(inner, each, path, True, (*seen, node["type"]))

    def nodes(self) -> dict[Path, Node]:
        """What runs, with all links resolved; a link to what does not run is left out."""
        found = {}
        for path, (_, node) in self._places.items():
            runs = node.get("mode") not in (_NEVER, _BYPASS) and node["type"] not in VIRTUAL
            if runs and node["type"] not in self._subgraphs:
                found[path] = self._node(path, node)
        return {
            path: replace(node, links={key: to for key, to in node.links.items() if to.node in found})
            for path, node in found.items()
        }

    def _node(self, path: Path, node: Mapping[str, Any]) -> Node:
        links: dict[str, Output] = {}
        promoted: dict[str, Any] = {}
        for index, entry in enumerate(node.get("inputs") or ()):
            source = self._input(path, index, entry["type"])
            if isinstance(source, _Value):
                promoted[entry["name"]] = source.value
            elif source is not None:
                links[entry["name"]] = source
        types = {entry["name"]: str(entry["type"]) for entry in node.get("inputs") or ()}
        outputs = tuple(str(entry["type"]) for entry in node.get("outputs") or ())
        saved = node.get("widgets_values_named") or node.get("widgets_values") or ()
        widgets = {**_widgets(node["type"], saved), **promoted}
        title = node.get("title") or node["type"]
        return Node(path, node["type"], title, links, types, widgets, outputs, saved, promoted)

    def _input(self, path: Path, index: int, kind: Any) -> Output | _Value | None:
        """What an input is connected to."""
        graph, node = self._places[path]
        entries = node.get("inputs") or ()
        link = graph.links.get(entries[index].get("link")) if index < len(entries) else None
        if link is None:
            return None
        _, origin, slot, _, _ = link
        if origin == _GRAPH_INPUT:
            return self._outer_input(path[:-1], graph.inputs[slot]["name"], kind)
        return self._output((*path[:-1], origin), slot, kind)

    def _outer_input(self, path: Path, name: str, kind: Any) -> Output | _Value | None:
        """What an input of a subgraph is connected to outside."""
        _, node = self._places[path]
        for index, entry in enumerate(node.get("inputs") or ()):
            if entry["name"] == name and entry.get("link") is not None:
                return self._input(path, index, kind)
        names, values = self._subgraphs[node["type"]].promoted(), node.get("widgets_values")
        if name in names and isinstance(values, list) and len(values) == len(names):
            return _Value(values[names.index(name)])
        return None  # the widget inside keeps its own value

    def _output(self, path: Path, slot: int, kind: Any) -> Output | _Value | None:
        """Where an output's value comes from."""
        if path not in self._places:
            return None
        _, node = self._places[path]
        if node.get("mode") == _NEVER:
            return None
        if node.get("mode") == _BYPASS:
            index = _bypassed(node, slot, kind)
            return None if index is None else self._input(path, index, kind)
        inner = self._subgraphs.get(node["type"])
        if inner is not None:
            for given in inner.outputs[slot : slot + 1]:
                for link in map(inner.links.get, given.get("linkIds") or ()):
                    if link is not None and link[3] == _GRAPH_OUTPUT:
                        return self._output((*path, link[1]), link[2], kind)
            return None
        if node["type"] in VIRTUAL:
            return self._input(path, slot, kind)
        return Output(path, slot)


def _bypassed(node: Mapping[str, Any], slot: int, kind: Any) -> int | None:
    """Which input a bypassed node hands through as this output; None where none fits."""
    inputs = [entry["type"] for entry in node.get("inputs") or ()]
    own = node["outputs"][slot]["type"]
    if kind in _ANY:
        return (slot if len(inputs) > slot else 0) if inputs else None
    if slot < len(inputs) and _fits(inputs[slot], own) and _fits(inputs[slot], kind):
        return slot
    if kind in inputs:
        return inputs.index(kind)
    return next((index for index, each in enumerate(inputs) if _fits(each, own) and _fits(each, kind)), None)


def _fits(one: Any, other: Any) -> bool:
    """LiteGraph's isValidConnection: several types are separated by commas."""
    if one in _ANY or other in _ANY:
        return True
    names = {each.strip().lower() for each in str(one).split(",")}
    return not names.isdisjoint(each.strip().lower() for each in str(other).split(","))


def _widgets(kind: str, saved: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Values of a node's own widgets, as far as their names are known."""
    return dict(saved) if isinstance(saved, Mapping) else dict(zip(WIDGETS.get(kind, ()), saved, strict=False))


WIDGETS: Mapping[str, tuple[str, ...]] = {
    "UNETLoader": ("unet_name", "weight_dtype"),
    "UnetLoaderGGUF": ("unet_name",),
    "ParallelLoader": ("model_name", "weight_dtype"),
    "ParallelCheckpointLoader": ("ckpt_name", "weight_dtype"),
    "CheckpointLoaderSimple": ("ckpt_name",),
    "ImageOnlyCheckpointLoader": ("ckpt_name",),
    "LoraLoaderModelOnly": ("lora_name", "strength_model"),
    "LoraLoader": ("lora_name", "strength_model", "strength_clip"),
    "ComfySwitchNode": ("switch",),
    "PrimitiveBoolean": ("value",),
    "KSamplerSelect": ("sampler_name",),
    "ModelAttentionBackend": ("attention",),
    "SkipLayerGuidanceDiT": ("double_layers", "single_layers", "scale"),
    "SkipLayerGuidanceDiTSimple": ("double_layers", "single_layers"),
    "UNetTemporalAttentionMultiply": ("self_structural", "self_temporal", "cross_structural", "cross_temporal"),
}
"""Widgets whose values decide something here, in the order that files have them: the first ones of a node."""
