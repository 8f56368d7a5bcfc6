"""A template's prompt made small: from its MODELs' loaders to its samplers' latents, all else stands in.

Loaders of encoders, decoders, pictures and sounds, and nodes that need other models or that the server has not, give
random values of a family's shapes (stand_ins/). Sizes, lengths and steps are cut. What is between is the template's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from .judgement import Run
from .node_schema import Info, limits, widget_values
from .prompt_graph import Node, Output, Path
from .small_files import SmallFile

Prompt = dict[str, dict[str, Any]]

SAMPLERS = frozenset({"KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced"})
_PASSED_THROUGH = {"FluxKontextImageScale": "image"}
"""Nodes that make pictures large whatever their widgets say -> the input that takes their place."""
_REPLACED = frozenset(
    (
        "LTXVEmptyLatentAudio", "LTXVAudioVAEEncode", "TextGenerate", "TextGenerateLTX2Prompt", "RemoveBackground",
        "SAM3_Detect", "SAM3_VideoTrack", "MoGeInference", "MoGeRender", "DA3Inference", "DA3Render", "Painter",
        "ImageUpscaleWithModel", "CLIPVisionEncode", "GetVideoComponents",
        "TripoSplatPreprocessImage", "SCAIL2ColoredMask",
    )
)  # fmt: skip
_READING = frozenset({"RegexExtract", "JsonExtractString"})
"""Nodes that find something in a text, which is not in one that stands in."""
_MODELS = frozenset({"CLIP", "VAE", "CLIP_VISION", "CONTROL_NET", "STYLE_MODEL", "MODEL_PATCH"})
"""Types for which the loaders' stand-ins do, so that the nodes that take them run."""
_STEPS = 3
_SIDE, _LENGTH, _SECONDS = (64, 96), 9, 2


class CannotStandIn(Exception):
    """A node's output that nothing stands in for; the text says which."""


class SmallPrompt:
    """Makes the prompts of one template.

    Args:
        title: of the template; what stands in differs with it, so that nothing comes out of ComfyUI's cache.
        file_of: the small file for the name of one of its own.
        infos: of all node types that the server has.
    """

    def __init__(
        self,
        title: str,
        prompt: Mapping[Path, Node],
        file_of: Callable[[str], SmallFile],
        infos: Mapping[str, Info],
    ):
        self._title = title
        self._prompt = prompt
        self._run = Run(prompt)
        self._file_of = file_of
        self._infos = infos
        self._made: Prompt = {}
        self._kept: dict[Path, str] = {}
        self.loaders = self._run.sampled_loaders()

    def make(self, devices: str | None, folder: str, weight_dtype: str = "default") -> Prompt:
        """The graph in API form; each sampler's latent is written to FOLDER/NUMBER.safetensors.

        Args:
            devices: of Parallel Config; None for Load Diffusion Model.
            weight_dtype: of both loaders.

        Raises:
            CannotStandIn: see there.
        """
        self._made, self._kept = {}, {}
        self._devices, self._weight_dtype = devices, weight_dtype
        if devices is not None:
            auto = dict.fromkeys(("cfg", "data", "ulysses", "attention"), "auto")
            self._made["config"] = _node("ParallelConfig", devices=devices, compile="off", **auto)
        samplers = sorted(path for path in self._run.live if self._prompt[path].kind in SAMPLERS)
        samplers = [path for path in samplers if self._run.samples_with(path, self.loaders)]
        for number, path in enumerate(samplers):
            saved = {"samples": [self._keep(path), 0], "path": f"{folder}/{number}.safetensors"}
            self._made[f"save {number}"] = _node("StandInSaveSampled", **saved)
        return self._made

    @property
    def samplers(self) -> int:
        """How many latents it writes."""
        return sum(name.startswith("save ") for name in self._made)

    def _keep(self, path: Path) -> str:
        """Add a node with all that it needs; returns its id."""
        if path in self._kept:
            return self._kept[path]
        node = self._prompt[path]
        name = self._kept[path] = ".".join(map(str, path))
        if path in self.loaders:
            self._made[name] = self._loader(path)
            return name
        info = self._infos[node.kind]
        values = {each: self._cut(node, each, value) for each, value in widget_values(node, info).items()}
        if "lora_name" in values:
            first = min(self._run.loaders_of(path) & self.loaders)
            values["lora_name"] = self._file_of(self._run.file(first)).name
        values |= {each: self._link(to, each, node) for each, to in self._run.links(node).items()}
        self._made[name] = _node(node.kind, **_in_range(values, info))
        return name

    def _loader(self, path: Path) -> dict[str, Any]:
        file = self._file_of(self._run.file(path)).name
        if self._devices is None:
            return _node("UNETLoader", unet_name=file, weight_dtype=self._weight_dtype)
        common = {"weight_dtype": self._weight_dtype, "parallel_config": ["config", 0]}
        return _node("ParallelLoader", model_name=file, **common)

    def _link(self, to: Output, name: str, taker: Node) -> Any:
        """What is connected to an input: a node's output, a stand-in's, or a number that was cut."""
        source = self._prompt[to.node]
        kind = source.outputs[to.slot] if to.slot < len(source.outputs) else taker.types[name]
        kind = taker.types[name] if kind in ("*", "") else kind
        if to.node in self.loaders:
            return [self._keep(to.node), 0] if kind == "MODEL" else self._stand_in(to, kind)
        if source.kind in ("PrimitiveInt", "PrimitiveFloat"):
            value = widget_values(source, self._infos[source.kind]).get("value")
            return self._cut(taker, name, value)
        if name == "steps":
            return self._cut(taker, name, _STEPS)
        if source.kind in _PASSED_THROUGH and _PASSED_THROUGH[source.kind] in source.links:
            return self._link(source.links[_PASSED_THROUGH[source.kind]], name, taker)
        if source.kind == "ComfySwitchNode" and len(chosen := self._chosen(source)) == 1:
            return self._link(chosen[0], name, taker)
        if source.kind == "LTXVLatentUpsampler":
            samples = self._link(source.links["samples"], "samples", source)
            own = f"{self._name(to)} twice"
            self._made[own] = _node("StandInLatentTwice", samples=samples)
            return [own, 0]
        return self._stand_in(to, kind) if self._is_replaced(source) else [self._keep(to.node), to.slot]

    def _chosen(self, switch: Node) -> list[Output]:
        return [to for name, to in self._run.links(switch).items() if name in ("on_true", "on_false")]

    def _is_replaced(self, node: Node) -> bool:
        """Whether a stand-in gives what it would."""
        if node.kind not in self._infos or node.kind in _REPLACED:
            return True
        if node.kind in _READING:
            return self._rests_on_stand_ins(node)
        if not node.links:
            return node.kind.startswith("Load") or bool(set(node.outputs) & (_MODELS | {"IMAGE", "VIDEO", "AUDIO"}))
        needs = {self._type(to) for to in node.links.values()}
        return any(kind.endswith(("_MODEL", "_ENCODER")) for kind in needs - _MODELS)

    def _rests_on_stand_ins(self, node: Node) -> bool:
        sources = [self._prompt[to.node] for to in node.links.values()]
        return any(self._is_replaced(each) or self._rests_on_stand_ins(each) for each in sources)

    def _type(self, to: Output) -> str:
        outputs = self._prompt[to.node].outputs
        return outputs[to.slot] if to.slot < len(outputs) else "*"

    def _stand_in(self, to: Output, kind: str) -> list[Any]:
        kind = kind.split(",")[0]
        if f"StandIn{kind}" not in self._infos:
            raise CannotStandIn(f"{self._prompt[to.node].kind} gives {kind}")
        name = self._name(to)
        file = self._file_of(self._run.file(self._serves(to.node)))
        if kind == "MODEL_PATCH" and "patch" not in file.spec:
            raise CannotStandIn(f"{self._prompt[to.node].kind} gives a patch of {file.key}")
        spec = {**file.spec, "seed": f"{self._title} {name}", "latent": [1, 8, 13, 16]}
        self._made[name] = _node(f"StandIn{kind}", spec=json.dumps(spec))
        return [name, 0]

    def _serves(self, source: Path) -> Path:
        """The loader of the MODEL for which a node gives something: its own, or that of the nearest sampler behind it.

        Behind a decoder comes the sampler whose latent it takes.
        """
        if source in self.loaders:
            return source
        seen, near = {source}, [source]
        for path in near:
            links = self._run.links(self._prompt[path])
            latents = [to.node for name, to in links.items() if self._prompt[path].types[name] == "LATENT"]
            for each in (path, *latents) if path != source else ():
                if self._prompt[each].kind in SAMPLERS and (found := self._run.before_model(each) & self.loaders):
                    return min(found)
            takers = sorted(self._takers.get(path, set()) - seen)
            seen.update(takers)
            near += takers
        return min(self.loaders)

    @cached_property
    def _takers(self) -> dict[Path, set[Path]]:
        takers: dict[Path, set[Path]] = {}
        for path in self._run.live:
            for to in self._run.links(self._prompt[path]).values():
                takers.setdefault(to.node, set()).add(path)
        return takers

    def _name(self, to: Output) -> str:
        return f"{'.'.join(map(str, to.node))} output {to.slot}"

    def _cut(self, node: Node, name: str, value: Any) -> Any:
        """A size, length or number of steps made small."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        name = name.rpartition(".")[2].lower()
        if name in ("start_at_step", "end_at_step", "step"):
            steps = widget_values(node, self._infos[node.kind]).get("steps") or 20
            if not 0 < value < steps:
                return value if value >= 1000 else min(value, _STEPS)
            # What goes on after another sampler has a step at least.
            return min(value, _STEPS - 1, math.ceil(value * _STEPS / steps))
        rules: tuple[tuple[tuple[str, ...], float], ...] = (
            (("steps",), _STEPS), (("batch_size", "amount", "layers"), 2), (("megapixels",), 0.01),
            (("length", "frames", "num_frames", "video_frames", "frames_number", "frame_count"), _LENGTH),
            (("seconds", "duration", "seconds_total"), _SECONDS),
        )  # fmt: skip
        for names, most in rules:
            if name in names:
                return min(value, most)
        sized = ("width", "height", "size", "edge", "dimension", "resolution", "longer", "shorter", "area")
        if value >= 128 and any(part in name for part in sized):
            return _SIDE[1] if value > 900 else _SIDE[0]
        # Numbers that go into an expression: sizes and lengths are the large ones.
        return _SIDE[0] if value >= 256 and name in ("a", "b", "c", "value") else value


def _in_range(values: dict[str, Any], info: Info) -> dict[str, Any]:
    """Values as the node's widgets take them."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            least, most, _ = limits(info, name)
            values[name] = type(value)(max(least, min(most, value)))
    return values


def _node(kind: str, /, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}
