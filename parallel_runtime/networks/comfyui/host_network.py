"""A ComfyUI network that the ranks of a mesh run together; beside ParallelTransformer, which wraps diffusers'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ...acceleration.peer_memory import PeerSharing
from ...acceleration.pulse import Pulse
from ...acceleration.recordings import RecordedForward
from ...attention.choice import check_ring, measurements, resolve_kernel
from ...attention.kernels import KERNELS
from ...config import COMFYUIS
from ...errors import ConfigurationError, UnsupportedModelError
from ...mesh.mesh import Layout, Mesh, single_rank_mesh
from ...requests.conditioning import CONTROL
from ...requests.patches import CARRIED
from ...said import said
from ...streaming.block_stream import BlockStream
from ...switches import is_on
from ..attention_operator import attending
from ..block_attention import HostAttention, Suited
from ..repeated_calls import BlockCompilation, RepeatedCalls
from ..residual_rows import ResidualRows, kind_of
from ..stages import StageBlocks
from ..tables.blocks import LATENT_SHAPES
from ..token_split import RunBlock, TokenSplit
from .description import Described
from .live_patches import LivePatches, act_between_blocks
from .own_cache import OwnCache
from .prepared_network import agreeing_on_scales
from .seam import IN_LOOP, RUN_SIGMAS, enter, look_up

_WORD = 8
"""Bytes that peers exchange at once (acceleration/peer_exchange.py)."""
_OTHER_VALUES = (0.9, 0.5)
"""What x and timestep are multiplied by to see whether a recording follows them."""


class HeldSplit(Protocol):
    """A network as a rank holds it (loading/held_network.py)."""

    here: bool
    owned: tuple[int, int] | None
    stage: StageBlocks | None
    device: torch.device
    split: TokenSplit
    pulse: Pulse | None
    stream: BlockStream | None
    own_cache: OwnCache

    @property
    def network(self) -> torch.nn.Module:
        """With its weights, on the device."""
        ...

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Have the network run as the stage with these blocks; None: with all."""
        ...


class HostNetwork(RepeatedCalls):
    """Runs calls in ComfyUI's convention over a mesh, which is what the network takes by itself.

    Args:
        latent: ComfyUI's format of the latents.
        attention: one of config.ATTENTION_BACKENDS.
        dtype: that it computes in.
        compile: the blocks that the data names are compiled when they first run.
    """

    def __init__(
        self,
        held: HeldSplit,
        described: Described,
        latent: Any,
        attention: str,
        dtype: torch.dtype,
        compile: bool = False,
    ):
        self.mesh = single_rank_mesh()
        self._held = held
        self.stream = held.stream
        self._described = described
        self._latent = latent
        self._runs_in_a_ring = False
        self._traits = (held.device, dtype, described.head_dim)
        as_it_is = attention == COMFYUIS
        # Over tokens of several ranks that function cannot attend: there PyTorch chooses, as in most of ComfyUI.
        self.attention = resolve_kernel("sdpa" if as_it_is else attention, *self._traits, measurements())
        on_gpu, chosen = held.device.type == "cuda", attention != "auto"
        suited = Suited(dtype, described.head_dim, chosen) if (on_gpu or chosen) and not as_it_is else None
        self._patches = LivePatches(held.device)
        self._residual_rows = ResidualRows()
        self._attend = HostAttention(KERNELS[self.attention], held.split, suited)
        # Weights that come block by block are not there before their block.
        self._modulates = is_on("modulation") and held.stream is None
        self._peers = self._share_memory(dtype) if is_on("peers") else None
        self._run_block: RunBlock | None = None
        self._compilation = self._compile_blocks() if compile and described.data is not None else None
        self._recorded = None
        # A recording would read what the network kept where that was, whatever became of it.
        keeps = described.data is not None and described.data.clears
        if on_gpu and is_on("recordings") and not keeps:
            self._recorded = RecordedForward(
                self.call_at_once,
                made_outside=held.split.read,
                # A graph ends where all its streams have come together.
                pulse=held.pulse if held.stream is None else None,
                probe=_other_values,
            )

    def _share_memory(self, dtype: torch.dtype) -> PeerSharing | None:
        facts, head_dim = self._described.facts, self._described.head_dim
        if self._described.data is None or head_dim * dtype.itemsize % _WORD:
            return None
        return PeerSharing(facts.heads, head_dim, dtype, self._held.device, self.attention)

    def _compile_blocks(self) -> BlockCompilation:
        from ..compiled_blocks import CompiledCut  # imports much of torch that nothing else needs

        compiled = CompiledCut(self._held.network, self._held.split, self._attend)
        self._run_block = compiled.run
        return BlockCompilation(compiled)

    @property
    def stage(self) -> StageBlocks | None:
        """As which it runs."""
        return self._held.stage

    @property
    def owned(self) -> tuple[int, int] | None:
        """(start, stop) of the blocks that it runs; None: all."""
        return self._held.owned if self.stage is None else self.stage.owned

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        return self._described.patch[-1]

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Run as the stage with these blocks from the next call on; None: with all."""
        self._held.run_as(owned)

    @property
    def rows_together(self) -> bool:
        """Every rank computes all rows of a batch."""
        return self._described.rows_together

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of the network; none while it is not on the device."""
        return self._held.network.parameters() if self._held.here else iter(())

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh from the next call on.

        Raises:
            ConfigurationError: see `check_mesh`.
        """
        self.check_mesh(mesh)
        self.mesh = mesh
        self._held.split.set_mesh(mesh)

    def check_mesh(self, mesh: Layout) -> None:
        """Refuse a mesh that the network cannot run over. No collective.

        Raises:
            ConfigurationError: tokens that are not shared out, stages, or a ring without a kernel for it.
        """
        if mesh.plan.sequence > 1 and self._described.data is None:
            raise ConfigurationError(
                said("The plan asks for {plan}. {why_whole}", plan=mesh.plan, why_whole=self._described.why_whole),
                "Set ulysses and ring to 1; cfg and data share out CFG branches and pictures.",
            )
        if mesh.plan.pipe > 1 and not self._described.facts.has_stages:
            title = self._described.facts.title
            raise ConfigurationError(said("{title} cannot be cut into stages.", title=title), "Set stages to 1.")
        self.check_ring(mesh)

    def check_ring(self, layout: Layout) -> None:
        """Refuse a layout with a ring for which the attention backend is not made. No collective."""
        if layout.plan.ring > 1 and layout.plan.pipe == 1 and not self._runs_in_a_ring:
            check_ring(self.attention, *self._traits)
            self._runs_in_a_ring = True  # found by running the kernel: once is enough

    @torch.no_grad()
    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        """One call in ComfyUI's convention. Collective over the sequence group.

        Args:
            x: (B, C, ...), or (B, 1, N) of several latents one after the other, whose shapes the conditioning names.
            timestep: (B,) or (B, frames), float32.
            conditioning: context and the family's extras; control, residuals of a ControlNet.

        Returns:
            The prediction, shaped as the latent part of x.

        Raises:
            UnsupportedModelError: the network did not run as its data says.
        """
        # What functions of nodes do in a call (remember, look at values) is in no recording.
        patched = _patched(conditioning)
        run = self._at_once if patched or self.stage is not None else self.record_or_call
        self._held.split.noted = None
        output: torch.Tensor = run(x, timestep, dict(conditioning))
        if CONTROL in conditioning:
            kind = None if patched else kind_of(x, conditioning, self.mesh)
            self._residual_rows.called(kind, self._held.split.noted)
        return output

    def residual_rows(self, residuals: Any, tokens: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Which rows of a ControlNet's residuals this rank read in the last call; see `rows_read`."""
        data = self._described.data
        return self._residual_rows.read(data.blocks, residuals, tokens) if data is not None else {}

    def _at_once(self, *args: Any) -> torch.Tensor:
        with self.stream.reading() if self.stream is not None else contextlib.nullcontext():
            return self.call_at_once(*args)

    def call_at_once(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: dict[str, Any]) -> torch.Tensor:
        """What `predict` does, without recording."""
        output = self._call(x, timestep, conditioning)
        if self._held.split.keeps:
            # Which ranks had kept it already follows from nothing that they agreed on. So one that had not has now, by
            # itself, and runs what all of them run: the exchanges are the same whoever had what.
            output = self._call(x, timestep, conditioning)
        return output

    def _call(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        import comfy.utils

        arguments = dict(conditioning)
        self._held.own_cache.same_objects(self._held.network, arguments)
        shapes = arguments.pop(LATENT_SHAPES, None)
        table = arguments.pop(RUN_SIGMAS, None)
        in_loop = arguments.pop(IN_LOOP, False)
        given = x if shapes is None else comfy.utils.unpack_latents(x, [tuple(shape) for shape in shapes])
        split = self._held.split
        patched = _patched(arguments)
        compiles = not patched or _between_blocks(arguments)
        split.begin(self._attend, self._run_block if compiles else None, self._peers, functions=patched)
        shares = self._modulates and not patched and self.stage is None
        split.modulation.begin(self.mesh if shares else None)
        options = self._patches.put_in(arguments.pop("transformer_options", {}))
        options["optimized_attention_override"] = self._attend
        if table is not None:
            options |= look_up(table, timestep)
        with contextlib.ExitStack() as held:
            held.callback(split.end)
            if split.scales_by_input and split.degree > 1:
                held.enter_context(agreeing_on_scales())
            held.enter_context(attending(self._attend.at, self._attend.over_peers))
            if self._compilation is not None and compiles:
                held.enter_context(self._compilation.around_forward())
            if self.stream is not None:
                held.enter_context(self.stream.forward())
            output = enter(self._held.network, given, timestep, {**arguments, "transformer_options": options}, in_loop)
        if split.pending:
            raise UnsupportedModelError(
                said("The network left {pending} before the last block.", pending=", ".join(sorted(split.pending))),
                "Set ulysses and ring to 1 in Parallel Config; CFG branches and pictures are still shared out.",
            )
        return output if isinstance(output, torch.Tensor) else comfy.utils.pack_latents(output)[0]

    @torch.no_grad()
    def invoke(self, method: str, arguments: Mapping[str, Any]) -> torch.Tensor:
        """What a method of the network gives, outside of its forward; no collective."""
        result: torch.Tensor = getattr(self._held.network, method)(**arguments)
        return result

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that `predict` gives for an x of that shape."""
        if len(x_shape) - 2 != self._latent.latent_dimensions:
            return x_shape  # several latents in one row
        return (x_shape[0], self._latent.latent_channels, *x_shape[2:])

    def forget_runs(self) -> None:
        """Let go of what runs have left behind on the device."""
        self.forget_calls()
        self._held.split.forget()
        if self.stage is not None:
            self.stage.forget()
        self._patches.forget()
        if self._held.here:
            self._held.own_cache.clear(self._held.network)


def _patched(conditioning: Mapping[str, Any]) -> bool:
    return bool(conditioning.get("transformer_options", {}).get(CARRIED))


def _between_blocks(conditioning: Mapping[str, Any]) -> bool:
    return act_between_blocks(conditioning["transformer_options"][CARRIED])


def _other_values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A call with another x and timestep, which come first; what else there is stays the same in a run."""
    other = [(tensor * by).to(tensor.dtype) for tensor, by in zip(tensors, _OTHER_VALUES, strict=False)]
    return [*other, *tensors[len(other) :]]
