"""A ComfyUI network that the ranks of a mesh run together; beside ParallelTransformer, which wraps diffusers'."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...acceleration.channels_last import FusedFunctions, usable
from ...attention.choice import resolve_kernel
from ...config import COMFYUIS
from ...errors import UnsupportedModelError
from ...exchange.head_routes import HeadSharing
from ...requests.patches import CARRIED
from ...switches import is_on
from ..block_attention import Suited
from ..cut_blocks import SPLIT_NO_TOKENS
from ..facts import Described
from ..network import Network
from ..tables.blocks import LATENT_SHAPES
from ..tables.blocks import Network as Data
from .live_patches import LivePatches, act_between_blocks
from .prepared_network import agreeing_on_scales
from .seam import IN_LOOP, RUN_SIGMAS, enter, look_up

_OTHER_VALUES = (0.9, 0.5)  # what x and timestep are multiplied by to see whether a recording follows them
_MOST = 4  # tensors that are told apart at once: reference pictures of the CFG branches


class ComfyNetwork(Network):
    """Runs calls in ComfyUI's convention over a mesh, which is what the network takes by itself.
    `held` is the network as a rank has it (`NetworkWeights` of loading/comfyui_network.py), `latent` ComfyUI's format
    of its latents, `attention` one of config.ATTENTION_BACKENDS, `dtype` what it computes in."""

    def __init__(
        self, held: Any, described: Described, latent: Any, attention: str, dtype: torch.dtype, compile: bool = False
    ):
        head_dim, on_gpu, chosen = described.head_dim, held.device.type == "cuda", attention != "auto"
        as_it_is = attention == COMFYUIS
        # Over tokens of several ranks that function cannot attend: there PyTorch chooses, as in most of ComfyUI.
        kernel = resolve_kernel("sdpa" if as_it_is else attention, held.device, dtype, head_dim)
        suited = Suited(dtype, head_dim, chosen) if (on_gpu or chosen) and not as_it_is else None
        heads = HeadSharing(described.facts.heads, head_dim, dtype, held.device, kernel)
        token = described.patch[-1] if described.patch else 1
        super().__init__(heads, token, held.stages, held.stream, suited)
        self.rows_together = described.rows_together
        self._held = held
        self._latent = latent
        self._patches = LivePatches(held.device)
        if compile and described.data is not None:
            self._compile(held.network, described.data.blocks)
        self._side_by_side = compile and described.side_by_side and not as_it_is and is_on("unets")
        # A recording would read what the network kept where that was, whatever became of it.
        if described.data is None or not described.data.clears:
            self._record(_other_values)

    @torch.no_grad()
    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        # What functions of nodes do in a call (remember, look at values) is in no recording.
        return self.record_or_call(x, timestep, dict(conditioning), at_once=_patched(conditioning))

    def call_at_once(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: dict[str, Any]) -> torch.Tensor:
        output = self._call(x, timestep, conditioning)
        if self._split.keeps:
            # Which ranks had kept it already follows from nothing that they agreed on. So one that had not has now, by
            # itself, and runs what all of them run: the exchanges are the same whoever had what.
            output = self._call(x, timestep, conditioning)
        return output

    def _call(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        import comfy.utils

        arguments = dict(conditioning)
        self._held.own_cache.same_objects(self._held.network, arguments)
        shapes = arguments.pop(LATENT_SHAPES, None)
        table, in_loop = arguments.pop(RUN_SIGMAS, None), arguments.pop(IN_LOOP, False)
        given = x if shapes is None else comfy.utils.unpack_latents(x, [tuple(shape) for shape in shapes])
        split, patched = self._split, _patched(arguments)
        compiles = not patched or act_between_blocks(arguments["transformer_options"][CARRIED])
        options = self._patches.put_in(arguments.pop("transformer_options", {}))
        options["optimized_attention_override"] = self._attend
        if table is not None:
            options |= look_up(table, timestep)
        by_input = split.scales_by_input and split.degree > 1
        # Functions of nodes meet tensors that lie as they know them.
        arranges = self._side_by_side and not patched and usable(self._held.device)
        with (
            self._running(patched, compiles),
            agreeing_on_scales() if by_input else contextlib.nullcontext(),
            UnetFunctions() if arranges else contextlib.nullcontext() as functions,
        ):
            given = given if functions is None else functions.arranged(given)
            arguments["transformer_options"] = options
            output = enter(self._held.network, given, timestep, arguments, in_loop)
        if split.pending:
            what = "The network left {pending} before the last block."
            raise UnsupportedModelError(what, SPLIT_NO_TOKENS, pending=", ".join(sorted(split.pending)))
        return output.contiguous() if isinstance(output, torch.Tensor) else comfy.utils.pack_latents(output)[0]

    @torch.no_grad()
    def invoke(self, method: str, arguments: Mapping[str, Any]) -> torch.Tensor:
        """What a method of the network gives, outside of its forward; no collective."""
        return getattr(self._held.network, method)(**arguments)

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(x_shape) - 2 != self._latent.latent_dimensions:
            return x_shape  # several latents in one row
        return (x_shape[0], self._latent.latent_channels, *x_shape[2:])

    def forget_runs(self) -> None:
        super().forget_runs()
        self._patches.forget()
        if self._held.here:
            self._held.own_cache.clear(self._held.network)


def _patched(conditioning: Mapping[str, Any]) -> bool:
    return bool(conditioning.get("transformer_options", {}).get(CARRIED))


def _other_values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A call with another x and timestep, which come first; what else there is stays the same in a run."""
    other = [(tensor * by).to(tensor.dtype) for tensor, by in zip(tensors, _OTHER_VALUES, strict=False)]
    return [*other, *tensors[len(other) :]]


class UnetFunctions(FusedFunctions):
    """Inside, a place's channels lie side by side, and what attention made of the places stays as it lies."""

    def __init__(self) -> None:
        super().__init__(fused=True)
        self._known[torch.Tensor.contiguous] = self._contiguous

    def _contiguous(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        x = given.pop("input")
        lies = not given and x.ndim == 4 and self._takes(x)
        return x if lies and x.is_contiguous(memory_format=torch.channels_last) else function(x, **given)


class OwnCache:
    """The cache of one network, whose own code looks something up by the numbers of objects (`id`). These say nothing:
    rows of a batch are a new object at each call, with a number that another tensor may have had. So the network is
    given one object for equal contents, which lives as long as what was kept for it."""

    def __init__(self, data: Data | None):
        self._clears = data.clears if data is not None else ""
        self._by_object = data.by_object if data is not None else ()
        self._objects: list[torch.Tensor] = []

    def same_objects(self, network: nn.Module, arguments: dict[str, Any]) -> None:
        """Put the objects that the network knows in the places of equal ones."""
        for name in self._by_object:
            if (given := arguments.get(name)) is None:
                continue
            known = next((each for each in self._objects if _equal(each, given)), None)
            if known is None:
                if len(self._objects) == _MOST:
                    self.clear(network)
                known = given.clone()
                self._objects.append(known)
            arguments[name] = known

    def clear(self, network: nn.Module) -> None:
        """Have the network keep nothing."""
        if self._clears:
            getattr(network, self._clears)()
        self._objects.clear()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
