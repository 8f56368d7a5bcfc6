"""What is changed of a transformer so that ranks compute it together: hooks at its modules' borders, its attention."""

from __future__ import annotations

from typing import Any

import torch

from ..acceleration.peer_sharing import PeerSharing
from ..attention import rebind
from ..attention.kernels import KERNELS
from ..mesh.mesh import Mesh
from .module_paths import matches
from .network_parts import NetworkParts
from .sequence import SequenceSplit, gather_hook, output_split_hook, split_hook
from .sequence_attention import SequenceAttention
from .stale_keys import StaleKeys
from .timestep import ExactTimestep


class Borders:
    """Hooks and attention of one wrapped transformer, and the forward that is under way in them.

    Made, they are in place. Where making them fails, the transformer is as it was.

    Args:
        peers: None keeps the exchange of heads on collectives.
        keys: of a stage of a pipeline.

    Raises:
        UnsupportedModelError: the attention cannot be exchanged.
    """

    def __init__(self, parts: NetworkParts, mesh: Mesh, peers: PeerSharing | None, keys: StaleKeys | None):
        self._parts = parts
        self.split = SequenceSplit(mesh, parts.spec.attended, peers)
        self._timestep = ExactTimestep(parts.spec.timestep_scale)
        over_all = SequenceAttention(KERNELS[parts.kernel], self.split.tokens, keys)
        if keys is not None:
            keys.attends[True] = over_all.attend_slots
        self._rebound = rebind.apply(parts.attention, over_all, self._attention_over_parts(keys))
        self._handles = self._register()
        self._share_modulations(mesh)

    def _attention_over_parts(self, keys: StaleKeys | None) -> dict[str, SequenceAttention]:
        found: dict[str, SequenceAttention] = {}
        for pattern, attended in self._parts.spec.attended_by.items():
            # Parts that some attention modules are about are image tokens without the text.
            of_image = keys.of_image() if keys is not None else None
            attention = SequenceAttention(KERNELS[self._parts.kernel], self.split.among(attended), of_image)
            if keys is not None:
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
        for path, modulation in self._parts.modulations.items():
            handles.append(find(path).register_forward_hook(modulation.hook))
        return handles

    def _share_modulations(self, mesh: Mesh) -> None:
        for modulation in self._parts.modulations.values():
            modulation.set_mesh(mesh)

    def set_mesh(self, mesh: Mesh) -> None:
        """Go over another mesh from the next forward on."""
        self.split.set_mesh(mesh)
        self._share_modulations(mesh)

    def start(
        self, timestep: torch.Tensor | None, assigned: tuple[int, ...] | None = None, text: tuple[str, ...] = ()
    ) -> None:
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
        for modulation in self._parts.modulations.values():
            modulation.forget()

    def undo(self) -> None:
        """Leave the transformer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._rebound.undo()
        for modulation in self._parts.modulations.values():
            modulation.undo()
