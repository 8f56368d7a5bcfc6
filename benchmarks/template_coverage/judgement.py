"""Whether a template's prompt runs when the loaders of its sampled MODELs are ours, and what stands against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .node_types import (
    CONDITIONINGS,
    LOADERS,
    NODE_TYPES,
    OUTPUTS,
    SAMPLERS,
)
from .prompt_graph import Node, Output, Path

Prompt = Mapping[Path, Node]


@dataclass(frozen=True)
class Reason:
    """Why a prompt does not convert.

    Args:
        node: type of the node.
    """

    node: str
    text: str

    def __str__(self) -> str:
        return f"{self.node}: {self.text}"


@dataclass(frozen=True)
class Judgement:
    """What is found of a prompt.

    Args:
        files: of the diffusion models that it samples with.
        reasons: on the way from the loaders to the samplers; () where it converts.
    """

    files: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def converts(self) -> bool:
        """It runs with our loaders now."""
        return not self.reasons

    @property
    def first(self) -> Reason | None:
        """The first reason, if there is one."""
        return next(iter(self.reasons), None)


def judge(prompt: Prompt) -> Judgement | None:
    """Judge a prompt; None where no local diffusion model is sampled in it."""
    run = Run(prompt)
    sampled = run.sampled_loaders()
    if not sampled:
        return None
    order = sorted(run.model_nodes(sampled), key=lambda path: (run.distance(path), path))
    # A node that is met twice (two experts, two stages) says the same.
    reasons = dict.fromkeys(reason for path in (*sorted(sampled), *order) for reason in run.reasons(path))
    files = dict.fromkeys(run.file(path) for path in sorted(sampled))
    return Judgement(tuple(files), tuple(reasons))


def run_kinds(prompt: Prompt) -> set[str]:
    """Types of the nodes that a server would run."""
    return {prompt[path].kind for path in Run(prompt).live}


class Run:
    """The nodes of a prompt that the server would execute."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt
        ends = [path for path, node in prompt.items() if OUTPUTS.fullmatch(node.kind)]
        self.live = self.reached(ends)

    def reached(self, ends: Iterable[Path], follow: Callable[[Node, str], bool] = lambda node, name: True) -> set[Path]:
        """All nodes upstream of some, and these."""
        found: set[Path] = set()
        waiting = list(ends)
        while waiting:
            path = waiting.pop()
            if path not in found:
                found.add(path)
                node = self.prompt[path]
                waiting += [to.node for name, to in self.links(node).items() if follow(node, name)]
        return found

    def links(self, node: Node) -> dict[str, Output]:
        """Inputs that are asked for: a switch asks for one of its two, if its value is known here."""
        if node.kind != "ComfySwitchNode":
            return dict(node.links)
        value = self._value(node, "switch")
        left_out = {True: "on_false", False: "on_true"}.get(value) if isinstance(value, bool) else None
        return {name: to for name, to in node.links.items() if name != left_out}

    def _value(self, node: Node, name: str) -> object:
        """Of a widget, or of the constant or switch that is connected to it; None where it is computed."""
        link = node.links.get(name)
        if link is None:
            return node.widgets.get(name)
        source = self.prompt[link.node]
        if source.kind == "ComfySwitchNode":
            chosen = "on_true" if self._value(source, "switch") else "on_false"
            return self._value(source, chosen) if chosen in source.links else None
        return self._value(source, "value") if source.kind == "PrimitiveBoolean" else None

    def carries(self, node: Node, name: str, *types: str) -> bool:
        """Whether an input takes something of these types."""
        to = node.links[name]
        outputs = self.prompt[to.node].outputs
        return node.types[name] in types or (to.slot < len(outputs) and outputs[to.slot] in types)

    def _takes_model(self, path: Path) -> bool:
        node = self.prompt[path]
        return any(self.carries(node, name, "MODEL") for name in self.links(node))

    def loaders_of(self, path: Path) -> set[Path]:
        """Loaders of the MODELs that a node takes."""
        upstream = self.reached([path], lambda node, name: self.carries(node, name, "MODEL"))
        return {each for each in upstream if not self._takes_model(each)} - {path}

    def sampled_loaders(self) -> set[Path]:
        """Loaders of MODELs that are sampled, or taken by a node that is not known."""
        found: set[Path] = set()
        for path in self.live:
            kind = NODE_TYPES.get(self.prompt[path].kind)
            unknown = kind is None and "MODEL" not in self.prompt[path].outputs
            if self._takes_model(path) and (unknown or (kind is not None and kind.samples)):
                found |= self.loaders_of(path)
        return found

    def samples_with(self, path: Path, loaders: set[Path]) -> bool:
        """Whether a sampler runs a MODEL of these loaders, its own or a guider's."""
        return bool(self.before_model(path) & loaders)

    def before_model(self, path: Path) -> set[Path]:
        """What is before a sampler's MODEL, its own or a guider's."""
        return self.reached([path], lambda node, name: self.carries(node, name, "MODEL", "GUIDER"))

    def model_nodes(self, loaders: set[Path]) -> set[Path]:
        """Nodes that take a MODEL of these loaders, and the samplers and conditionings that go into them."""
        takers = {path for path in self.live if self._takes_model(path) and self.loaders_of(path) & loaders}
        ends = takers | {path for path in self.live if self._guides(path, takers)}
        beside = self.reached(ends, lambda node, name: self.carries(node, name, "SAMPLER", "CONDITIONING", "GUIDER"))
        return (takers | beside) - loaders

    def _guides(self, path: Path, takers: set[Path]) -> bool:
        """Whether a node samples with a guider that has one of these MODELs."""
        node = self.prompt[path]
        return any(to.node in takers and self.carries(node, name, "GUIDER") for name, to in self.links(node).items())

    def distance(self, path: Path) -> int:
        """Nodes between it and the farthest loader, so that reasons come in the order of execution."""
        node = self.prompt[path]
        before = [to.node for name, to in self.links(node).items() if self.carries(node, name, "MODEL")]
        return 1 + max(map(self.distance, before), default=0)

    def file(self, path: Path) -> str:
        """Name of the file that a loader loads."""
        node = self.prompt[path]
        loader = LOADERS.get(node.kind)
        return str(node.widgets.get(loader.file, "?")) if loader else "?"

    def reasons(self, path: Path) -> list[Reason]:
        """What stands against one node."""
        node = self.prompt[path]
        if self._takes_model(path):
            kind = NODE_TYPES.get(node.kind)
        elif "MODEL" in node.outputs:
            return self._loader_reasons(node)
        elif "SAMPLER" in node.outputs:
            kind = SAMPLERS.get(node.kind)
        elif "CONDITIONING" in node.outputs:
            known = node.kind in CONDITIONINGS or node.kind == "ComfySwitchNode"
            return [] if known else [Reason(node.kind, "not known")]
        else:
            return []  # it samples with a guider, or gives what a switch chooses from
        if kind is None:
            return [Reason(node.kind, "not known")]
        if not kind.reason or kind.idle(node.widgets):
            return []
        return [Reason(node.kind, kind.reason)]

    def _loader_reasons(self, node: Node) -> list[Reason]:
        loader = LOADERS.get(node.kind)
        if loader is None:
            return [Reason(node.kind, "not known")]
        return [Reason(node.kind, loader.reason)] if loader.reason else []
