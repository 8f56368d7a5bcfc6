"""What a model file declares. A model is data (a `ModelSpec`) plus one adapter; no forward is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...errors import RequestError
from ...said import said
from .call import Adapter


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header: shape, dtype name as safetensors spells it ("BF16", "F32", ...)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightRule:
    """One diffusers parameter out of one tensor of the original file.

    Args:
        target: parameter name in the diffusers transformer.
        source: key in the original layout (without a prefix such as `model.diffusion_model.`).
        rows: (start, length) on dim 0 of the source, for fused projections; None takes all of it.
        swap_halves: the two halves of dim 0 change places (scale and shift of the final modulation).
    """

    target: str
    source: str
    rows: tuple[int, int] | None = None
    swap_halves: bool = False


@dataclass(frozen=True)
class Part:
    """What not every checkpoint of a family has.

    Args:
        title: as errors call it.
        key: of the diffusers config; None there, or not there, says that the part is missing.
    """

    title: str
    key: str


class Keys(Protocol):
    """Diffusers' names of a family's tensors, and its authors'. See `KeyRules`, which reads them from a file."""

    def weight_rules(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[WeightRule]:
        """The rule of each parameter, by diffusers' names and shapes; none for names that are not known."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """A transformer family as data.

    Args:
        name: registry key, the diffusers file name without `transformer_` ("flux").
        title: how artists call it ("FLUX.1").
        transformer_class: class name in diffusers.
        block_lists: attribute paths, or glob patterns of such, of the block lists in forward order.
        self_attention: glob patterns of the modules whose attention runs over the split sequence; () where none is
            split, as in U-Nets: ranks then share out the batch alone.
        timestep_embedder: module whose first positional argument is the scaled timestep.
        timestep_scale: what the transformer's forward multiplies the timestep by before that module.
        keys: diffusers' names and the authors' of the same tensors.
        adapter: see `Adapter`.
        token: latent positions along one side of a token.
        former_class: what a config.json may call the class that was written before diffusers gave the family its own.
        ignores: keys of a config.json that the class does not take.
        belongs: a config.json of the class -> whether it is of this family, where others have the same class.
        needs: extra of the adapter -> the part without which it would be left unused, and is refused instead.
        prepare: called once on a freshly loaded transformer, for what ComfyUI's forward does and diffusers' does not.
    """

    name: str
    title: str
    transformer_class: str
    self_attention: tuple[str, ...]
    timestep_embedder: str
    keys: Keys
    adapter: Adapter
    block_lists: tuple[str, ...] = ("transformer_blocks",)
    timestep_scale: float = 1.0
    token: int = 2
    prepare: Callable[[torch.nn.Module], None] | None = None
    former_class: str = ""
    ignores: tuple[str, ...] = ()
    belongs: Callable[[Mapping[str, Any]], bool] = lambda config: True
    widths: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Part] = field(default_factory=dict)

    @property
    def splits_sequence(self) -> bool:
        """Ranks can share out the tokens of a picture."""
        return bool(self.self_attention)

    def check_widths(self, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Refuse inputs of another model, such as the conditioning of another family's text encoder.

        Raises:
            RequestError: an argument whose last dim differs from what the checkpoint takes.
        """
        for name, key in self.widths.items():
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and value.shape[-1] != config[key]:
                raise RequestError(
                    said(
                        "{title} takes {name} of width {config} in this checkpoint, but got {shape}.",
                        title=self.title,
                        name=name,
                        config=config[key],
                        shape=value.shape[-1],
                    ),
                    "Connect the text encoder and the latent that belong to this model.",
                )
