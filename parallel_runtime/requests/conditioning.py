"""Conditionings that the client sent once and refers to by number afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from .patches import CARRIED, TOGETHER, attached_in
from .requests import ConditioningRef, tensor_name
from .trees import flatten, map_tensors, restore

CONTROL = "control"  # ComfyUI's argument for what ControlNets add
FRAMES = "num_video_frames"
"""ComfyUI's argument for how many neighbouring rows of the batch are the frames of one video, where they are rows."""
PARTS = {"trellis2_coord_counts": 1, "trellis2_proj_feats": 3}
"""ComfyUI's arguments that no rank cuts and that have a part for each row of a branch -> their dims where they do."""
OPTIONS, BRANCHES = "transformer_options", "cond_or_uncond"
"""ComfyUI's argument for everything else, and its entry that says which CFG branch each part of the batch is."""


@dataclass(frozen=True)
class Shared:
    """An argument that is one for all rows of the batch, though it may look as if it had a row for each."""

    value: Any


@dataclass(frozen=True)
class Conditioning:
    """Keyword arguments of ComfyUI's transformer call, without x and timestep; those named in `shared` are one for all
    rows of the batch. `context`, where there is one, is the text's tokens (B, T, D)."""

    arguments: Mapping[str, Any]
    shared: frozenset[str] = frozenset()

    def rows(self, low: int, high: int, batch: int) -> Conditioning:
        """That of rows low to high of a batch."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[low:high] if tensor.ndim and tensor.shape[0] == batch else tensor

        arguments = {
            name: value if name in self.shared else map_tensors(value, own) for name, value in self.arguments.items()
        }
        options = arguments.get(OPTIONS, {})
        if branches := options.get(BRANCHES):
            part = batch // len(branches)
            if part and low % part == 0 and high % part == 0:
                left = branches[low // part : high // part]
            else:
                each = [branch for branch in branches for _ in range(part)][low:high]
                left = each if len(set(each)) > 1 else each[:1]
            arguments[OPTIONS] = {**options, BRANCHES: left}
        return Conditioning(arguments, self.shared)

    @property
    def together(self) -> bool:
        """A patch looks at several rows of the batch: every rank has to compute all of them."""
        carried = self.arguments.get(OPTIONS, {}).get(CARRIED) or {}
        return bool(carried.get(TOGETHER))

    def rows_at_once(self, batch: int) -> int:
        """Neighbouring rows of a batch that one rank has to compute: a video's frames, which attend to one another, or
        what arguments that no rank cuts have parts for."""
        parts = [(self.arguments.get(name), dims) for name, dims in PARTS.items()]
        counts = [part.shape[0] for part, dims in parts if isinstance(part, torch.Tensor) and part.ndim == dims]
        if isinstance(frames := self.arguments.get(FRAMES), int):
            counts.append(frames)
        return max((count for count in counts if 0 < count <= batch and batch % count == 0), default=1)

    def check_rows(self, batch: int) -> None:
        """RequestError where the text is of another batch."""
        items = self.arguments["context"].shape[0]
        if items not in (1, batch):
            text = "The conditioning holds {items} items, but the latent batch holds {batch}."
            raise RequestError(text, "Use one prompt, or as many as latents.", items=items, batch=batch)

    def names(self, numbers: Set[int]) -> bool:
        """Whether a patch of it has one of these networks."""
        return any(each.number in numbers for each in attached_in(list(self.arguments.values())))


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of its shape and type in the memory of one number, to find out what shapes a function makes of it. Not on
    the meta device, where the first of PyTorch's operators in Python imports the compiler: seconds of a first step."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def refer(number: int, arguments: Mapping[str, Any], index: int = 0) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
    """A new conditioning as the ranks get it, and its tensors by the names under which they travel; RequestError where
    an argument is or holds what does not travel."""
    trees: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    for key, value in arguments.items():
        try:
            trees[key] = flatten(value.value if isinstance(value, Shared) else value, tensors)
        except TypeError as error:
            text = "The model's input {key} is or holds {error}, which cannot be sent to the workers."
            fix = "Remove the node that adds it, or load the model with Load Diffusion Model."
            raise RequestError(text, fix, key=repr(key), error=error) from error
    shared = tuple(key for key, value in arguments.items() if isinstance(value, Shared))
    named = {tensor_name(number, place): tensor for place, tensor in enumerate(tensors)}
    return ConditioningRef(number, True, trees, len(tensors), shared, index), named


class ConditioningStore:
    """This rank's conditionings by number. The client decides what is kept, so that all ranks keep the same."""

    def __init__(self) -> None:
        self._kept: dict[int, Conditioning] = {}
        self.attached: dict[int, Any] = {}  # networks that conditionings name by these numbers

    def peek(self, reference: ConditioningRef, meta: Mapping[str, torch.Tensor]) -> Conditioning:
        """The conditioning as far as PREPARE can know it: shapes for a new one, the real one otherwise. RequestError
        where it is neither new nor kept, its tensors did not come along, or a network that it names is not here."""
        if not reference.new and reference.id not in self._kept:
            text = "Conditioning {id} is not known to the workers."
            raise RequestError(text, "Queue the prompt again.", id=reference.id)
        try:
            return self._assemble(reference, meta) if reference.new else self._kept[reference.id]
        except KeyError as error:
            text = "Conditioning tensor {error} did not come with the request."
            raise RequestError(text, "Report this.", error=error) from error

    def take(
        self, references: Sequence[ConditioningRef], tensors: Mapping[str, torch.Tensor], kept: Iterable[int] = ()
    ) -> list[Conditioning]:
        """The conditionings of a request. They are kept for later ones, as are those of `kept`, and no others."""
        named = {*kept, *(reference.id for reference in references)}
        self._kept = {number: each for number, each in self._kept.items() if number in named}
        self._kept |= {each.id: self._assemble(each, tensors) for each in references if each.new}
        return [self._kept[reference.id] for reference in references]

    def _assemble(self, reference: ConditioningRef, tensors: Mapping[str, torch.Tensor]) -> Conditioning:
        """A new conditioning, of a request's tensors or of their meta twins."""
        items = [tensors[tensor_name(reference.id, place)] for place in range(reference.count)]
        arguments = {key: restore(tree, items, self.attached) for key, tree in reference.trees.items()}
        return Conditioning(arguments, frozenset(reference.shared))

    def detach(self, kept: Iterable[int]) -> set[int]:
        """Forget networks but these, and conditionings that have one of them; return which went."""
        gone = self.attached.keys() - set(kept)
        for number in gone:
            del self.attached[number]
        self._kept = {number: each for number, each in self._kept.items() if not each.names(gone)}
        return gone

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.attached.clear()
