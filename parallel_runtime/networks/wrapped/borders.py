"""What is changed of a stage's transformer so that ranks compute it together: hooks, and its attention."""

from __future__ import annotations

from typing import Any

import torch

from ...attention import rebind
from ...attention.kernels import KERNELS
from ...mesh.mesh import Mesh
from ..module_paths import matches
from ..network_parts import NetworkParts
from ..sequence import SequenceSplit, gather_hook, output_split_hook, split_hook
from ..sequence_attention import SequenceAttention
from ..stale_keys import StaleKeys
from ..timestep import ExactTimestep


class Borders:
    """Hooks and attention of one wrapped transformer, and the forward that is under way in them.

    Made, they are in place. Where making them fails, the transformer is as it was.

    Args:
        keys: of the stage.

    Raises:
        UnsupportedModelError: the attention cannot be exchanged.
    """

    def __init__(self, parts: NetworkParts, mesh: Mesh, keys: StaleKeys):
        self._parts = parts
        self.split = SequenceSplit(mesh, parts.spec.attended)
        self._timestep = ExactTimestep(parts.spec.timestep_scale)
        over_all = SequenceAttention(KERNELS[parts.kernel], self.split.tokens, keys)
        keys.attends[True] = over_all.attend_slots
        self._rebound = rebind.apply(parts.attention, over_all, self._attention_over_parts(keys))
        self._handles = self._register()

    def _attention_over_parts(self, keys: StaleKeys) -> dict[str, SequenceAttention]:
        found: dict[str, SequenceAttention] = {}
        for pattern, attended in self._parts.spec.attended_by.items():
            # Parts that some attention modules are about are image tokens without the text.
            of_image = keys.of_image()
            attention = SequenceAttention(KERNELS[self._parts.kernel], self.split.among(attended), of_image)
            keys.attends[False] = attention.attend_slots
            found |= {path: attention for path in self._parts.attention if matches(path, pattern)}
        return found

    def _register(self) -> list[Any]:
        find, spec = self._parts.transformer.get_submodule, self._parts.spec
        handles: list[Any] = [
            find(spec.timestep_embedder).register_forward_pre_hook(self._timestep.hook, with_kwargs=True)
        ]
        for path, dims in spec.sequence_inputs.items():
            hook = split_hook(self.split, find(path), dict(dims))
            handles.append(find(path).register_forward_pre_hook(hook, with_kwargs=True))
        for path, dim in spec.sequence_splits.items():
            handles.append(find(path).register_forward_hook(output_split_hook(self.split, path, dim)))
        for path, dim in spec.sequence_outputs.items():
            handles.append(find(path).register_forward_hook(gather_hook(self.split, dim)))
        return handles

    def set_mesh(self, mesh: Mesh) -> None:
        """Go over another mesh from the next forward on."""
        self.split.set_mesh(mesh)

    def read(self) -> list[Any]:
        """What the last forward read beside arguments and weights."""
        return self.split.read()

    def start(self, timestep: torch.Tensor | None, assigned: tuple[int, ...] | None, text: tuple[str, ...]) -> None:
        """A forward starts.

        Args:
            timestep: (batch,), before the transformer rounds it.
            assigned, text: see `SequenceLayout`.
        """
        self.split.start(assigned, text)
        self._timestep.begin(timestep)

    def forget(self) -> None:
        """Let go of what the last forward has left on the device."""
        self.split.forget()
        self._timestep.begin(None)

    def undo(self) -> None:
        """Leave the transformer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._rebound.undo()
