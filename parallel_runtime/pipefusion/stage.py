"""One stage: a transformer that has only some of its blocks, run on all tokens or on one patch.

The model's own forward runs. What it embeds is cut to the patch, blocks of other stages are stood in for (blocks.py),
and the last stage's tokens are put back in their place in the whole, so that the model can unpack them as it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import RequestError
from ..mesh import Mesh
from ..models.spec import ModelSpec
from ..wrappers.graphs import RecordedForward
from ..wrappers.parallel_transformer import ParallelTransformer, parallelize
from .blocks import Relay, StageDone, Streams, Tapped, block_paths, skips_given, skips_taken, stages_of, streams_in
from .cut import Patch
from .slots import Slots
from .stale import Place, StaleKeys

_RECORDED = 64
"""Kept recordings: one for each patch and CFG branch."""


@dataclass
class _Cut:
    """What the hooks do to the forward at hand; `patch` None leaves all patches, in the order of `order` if any."""

    patch: Patch | None = None
    total: int = 0
    order: torch.Tensor | None = None
    restore: torch.Tensor | None = None


class Stage:
    """This rank's stage of a transformer.

    Args:
        transformer: diffusers transformer that went through `keep_blocks`.
        relay: from there.
        mesh, attention, compile, record: as for `parallelize`. Recorded forwards keep the memory of their keys and
            values, until another size of picture comes.
    """

    def __init__(
        self,
        transformer: nn.Module,
        spec: ModelSpec,
        relay: Relay,
        mesh: Mesh,
        attention: str,
        compile: bool,
        record: bool = True,
    ):
        self._stages = stages_of(spec)
        self.spec = spec
        self.mesh = mesh
        self.owned = relay.owned
        self.keys = StaleKeys()
        self._relay = relay
        self._cut = _Cut()
        # Before the wrapper's own hooks, which split what is left over the sequence group; the last one behind them.
        self._handles = [*self._cut_inputs(transformer), *self._cut_embeddings(transformer)]
        self.transformer: ParallelTransformer = parallelize(
            transformer, spec, mesh, attention=attention, compile=compile, record=False, share=False, keys=self.keys
        )
        for path, dim in spec.sequence_outputs.items():
            module = transformer.get_submodule(path)
            self._handles.append(module.register_forward_hook(self._placing_hook(dim)))
        paths = block_paths(transformer, spec)
        count = len(paths)
        self._recorded: RecordedForward | None = None
        if record and next(transformer.parameters()).is_cuda:
            self._recorded = RecordedForward(self._run, made_outside=self._made_outside, kept=_RECORDED)
        self._given: dict[int, torch.Tensor] = {}
        self._sizes: tuple[Any, ...] = ()
        # What comes in is what the first own block takes, what goes out what the first of the next stage does.
        self.streams_in, self.streams_out = (
            streams_in(self._stages, paths[bound]) if bound < count else () for bound in self.owned
        )
        self.skips_given = skips_given(count, self.owned) if self._stages.skips else ()
        self.skips_taken = skips_taken(count, self.owned) if self._stages.skips else ()
        self._tap(transformer)

    def _tap(self, transformer: nn.Module) -> None:
        # Around the block and not in it: what torch.compile made of the block stays as it is.
        paths = block_paths(transformer, self.spec)
        self._tapped = []
        for index in self.skips_given:
            parent, _, name = paths[index].rpartition(".")
            blocks = transformer.get_submodule(parent)
            self._tapped.append((blocks, name, blocks.get_submodule(name)))
            setattr(blocks, name, Tapped(blocks.get_submodule(name), self._relay, index))

    def unwrap(self) -> nn.Module:
        """Undo the wrapping and return the transformer, with all the blocks that were not forgotten."""
        transformer = self._release()
        self._relay.restore()
        return transformer

    def _release(self) -> nn.Module:
        if self._recorded is not None:
            self._recorded.clear()
        for handle in self._handles:
            handle.remove()
        for blocks, name, block in self._tapped:
            setattr(blocks, name, block)
        return self.transformer.unwrap()

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh with the same stages from the next forward on."""
        self.transformer.set_mesh(mesh)
        self.mesh = mesh

    def check_ring(self, mesh: Mesh) -> None:
        """See `ParallelTransformer.check_ring`."""
        self.transformer.check_ring(mesh)

    def rewrap(self, attention: str, compile: bool) -> Stage:
        """The same stage with other options; this one is of no use afterwards."""
        module = self._release()
        return Stage(module, self.spec, self._relay, self.mesh, attention, compile)

    def parameters(self) -> Any:
        """The stage's own parameters."""
        return self.transformer.parameters()

    @property
    def config(self) -> Any:
        """The diffusers config of the whole model."""
        return self.transformer.config

    def forward(
        self,
        arguments: Mapping[str, Any],
        received: Streams,
        patch: Patch | None,
        patches: Sequence[Patch],
        slots: Slots,
        call: int = 0,
        keep: bool = True,
        skips: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> Streams | torch.Tensor:
        """Run the stage's blocks. Collective over the sequence group.

        Args:
            arguments: of the model's forward, for the whole latent; on later stages only shapes, the text, the
                timestep and the like are read from them.
            received: what the stage before returned; nothing for the first.
            patch: the one to compute, or None for all at once.
            slots: how the tokens are dealt.
            call: which of the step's forwards this is.
            keep: whether keys and values are kept for later steps.
            skips: outputs of the blocks in `skips_taken`; afterwards `skips()` has those of `skips_given`.

        Returns:
            The streams for the next stage, or the output of the last one: shaped as the model's for the whole latent,
            of which only the patch's part means anything.
        """
        self._cut.patch, self._cut.total = patch, patches[-1].tokens[1]
        self._order(slots, patch, next(iter(arguments.values())).device)
        self._place = Place(
            call, slots, self.mesh.coordinate["ring"], patch.index if patch else None, _with_text(patch), keep
        )
        if self._recorded is None:
            result, self._given = self._run(dict(arguments), received, skips, "")
            return result
        # Whatever else the forward depends on is in the name: a recording is replayed for the same name only.
        name = f"{self._place} {patches}"
        given = dict(arguments), dict(received), dict(skips), name
        result, self._given = self._recorded(self.mesh, given, {})
        return result

    def _run(
        self,
        arguments: dict[str, Any],
        received: Streams,
        skips: Mapping[int, torch.Tensor],
        name: str,
    ) -> tuple[Streams | torch.Tensor, dict[int, torch.Tensor]]:
        """The forward, of these tensors and what `forward` has noted; with what the mirror image takes."""
        self._relay.received, self._relay.skips = received, dict(skips)
        try:
            result: Streams | torch.Tensor = self.transformer.staged(self._place, arguments)
        except StageDone as done:
            result = dict(done.streams)
        finally:
            self._relay.received = {}
        return result, {index: self._relay.skips[index] for index in self.skips_given}

    def _made_outside(self) -> Any:
        return self.keys.buffers, self._cut.order, self._cut.restore, self.transformer.made_outside()

    def finish(self) -> None:
        """A run is over: let the keys and values go, unless recorded forwards are to use them again."""
        if self._recorded is None:
            self.keys.clear()

    def begin(self, *sizes: Any) -> None:
        """A run begins; keys, values and recordings of a run of other sizes go."""
        if sizes != self._sizes:
            self._sizes = sizes
            self.keys.clear()
            if self._recorded is not None:
                self._recorded.clear()

    def skips(self) -> dict[int, torch.Tensor]:
        """What the last forward's blocks have made for the mirror image."""
        return self._given

    def _order(self, slots: Slots, patch: Patch | None, device: torch.device) -> None:
        """With several ranks to a sequence, synchronous steps deal every patch in bands, as the others will."""
        self._cut.order = self._cut.restore = None
        if patch is None and slots.degree > 1:
            order = torch.tensor(slots.rank_major(), device=device)
            self._cut.order, self._cut.restore = order, order.argsort()

    def _cut_inputs(self, transformer: nn.Module) -> list[Any]:
        handles = []
        for path, dims in self.spec.sequence_inputs.items():
            module = transformer.get_submodule(path)
            positions = {name: place for place, name in enumerate(inspect.signature(module.forward).parameters)}

            def hook(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                dims: Mapping[str, int] = dims,
                positions: Mapping[str, int] = positions,
            ) -> Any:
                given, named = list(args), dict(kwargs)
                for name, dim in dims.items():
                    if name in named:
                        named[name] = self._take(named[name], dim, name in self._stages.text)
                    elif positions[name] < len(given):
                        place = positions[name]
                        given[place] = self._take(given[place], dim, name in self._stages.text)
                return tuple(given), named

            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return handles

    def _cut_embeddings(self, transformer: nn.Module) -> list[Any]:
        return [
            transformer.get_submodule(path).register_forward_hook(
                lambda module, args, output, dim=dim, path=path: self._take(output, dim, path in self._stages.text)
            )
            for path, dim in self.spec.sequence_splits.items()
        ]

    def _take(self, value: Any, dim: int, text: bool) -> Any:
        """The patch's part of an argument or an embedding; text comes whole with the first patch, else not at all."""
        if isinstance(value, list | tuple):
            return type(value)(self._take(item, dim, text) for item in value)
        patch = self._cut.patch
        if not isinstance(value, torch.Tensor):
            return value
        if text:
            return value if _with_text(patch) else value.narrow(dim, 0, 0)
        if patch is not None:
            return value.narrow(dim, patch.tokens[0], patch.length)
        return value if self._cut.order is None else value.index_select(dim, self._cut.order)

    def _placing_hook(self, dim: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            patch = self._cut.patch
            if patch is None:
                return output if self._cut.restore is None else output.index_select(dim, self._cut.restore)
            shape = list(output.shape)
            shape[dim] = self._cut.total
            whole = output.new_zeros(shape)
            whole.narrow(dim, patch.tokens[0], patch.length).copy_(output)
            return whole

        return hook


def _with_text(patch: Patch | None) -> bool:
    return patch is None or patch.has_text


def deal(patches: Sequence[Patch], text: int, mesh: Mesh, spec: ModelSpec) -> Slots:
    """The slots of one forward's tokens.

    Raises:
        RequestError: a patch has fewer tokens than the sequence group has ranks.
    """
    stages = stages_of(spec)
    slots = Slots(tuple(patch.length for patch in patches), text, mesh.plan.ring, mesh.plan.ulysses, stages.text_first)
    if min(slots.patches) < slots.degree:
        raise RequestError(
            f"A patch of {min(slots.patches)} tokens cannot be split over {slots.degree} ranks.",
            "Use fewer patches or a larger picture.",
        )
    return slots
