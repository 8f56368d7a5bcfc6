"""One stage: a transformer that has only some of its blocks, run on all tokens or on one patch.

The model's own forward runs. What it embeds is cut to the patch, blocks of other stages are stood in for
(absent_blocks.py), and the last stage's tokens are put back in their place in the whole, so that the model can unpack
them as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..acceleration.recordings import RecordedForward
from ..mesh.agreement import NONE, agreed_history, offer_history
from ..mesh.mesh import Layout, Mesh
from ..networks.absent_blocks import (
    Relay,
    Replaced,
    StageDone,
    Streams,
    Tapped,
    block_paths,
    skips_given,
    skips_taken,
    stages_of,
    streams_in,
)
from ..networks.diffusers.spec import ModelSpec
from ..networks.key_slots import Slots
from ..networks.latent_cut import Patch
from ..networks.stale_keys import Place, StaleKeys
from ..networks.wrapped.parallel_transformer import ParallelTransformer, parallelize
from ..switches import is_on
from .patch_hooks import PatchHooks

_RECORDED = 64
"""Kept recordings: one for each patch and CFG branch."""


@dataclass(frozen=True)
class StageOutput:
    """What a stage has made of one forward.

    Args:
        skips: outputs of the blocks in `skips_given`, for the mirror image.
        streams: for the next stage.
        output: of the last stage, instead of streams: shaped as the model's for the whole latent, of which only the
            patch's part means anything.
    """

    skips: Mapping[int, torch.Tensor]
    streams: Streams | None = None
    output: torch.Tensor | None = None


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
        self._cut = PatchHooks(spec)
        # Before the wrapper's own hooks, which split what is left over the sequence group; the last one behind them.
        self._handles = self._cut.register_inputs(transformer)
        self.transformer: ParallelTransformer = parallelize(
            transformer, spec, mesh, attention=attention, compile=compile, record=False, share=False, keys=self.keys
        )
        self._handles += self._cut.register_outputs(transformer)
        paths = block_paths(transformer, spec)
        count = len(paths)
        self._recorded: RecordedForward | None = None
        if record and next(transformer.parameters()).is_cuda and is_on("recordings"):
            self._recorded = RecordedForward(self._run, made_outside=self._made_outside, kept=_RECORDED)
        self._sizes: tuple[Any, ...] = ()
        """Of the run that the kept keys and values are of."""
        self._place: Place | None = None
        """Where the tokens of the forward at hand belong."""
        first, following = self.owned
        self.streams_in = streams_in(self._stages, paths[first])
        """What comes in: what the first own block takes."""
        self.streams_out = streams_in(self._stages, paths[following]) if following < count else ()
        """What goes out: what the first block of the next stage takes."""
        self.skips_given = skips_given(count, self.owned) if self._stages.skips else ()
        self.skips_taken = skips_taken(count, self.owned) if self._stages.skips else ()
        self._tapped = [self._tap(transformer, paths[index], index) for index in self.skips_given]

    def _tap(self, transformer: nn.Module, path: str, index: int) -> Replaced:
        # Around the block and not in it: what torch.compile made of the block stays as it is.
        parent, _, name = path.rpartition(".")
        tapped = Tapped(transformer.get_submodule(path), self._relay, index)
        return Replaced.by(tapped, transformer.get_submodule(parent), name)

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
        for tapped in self._tapped:
            tapped.restore()
        return self.transformer.unwrap()

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh with the same stages from the next forward on."""
        self.transformer.set_mesh(mesh)
        self.mesh = mesh

    def offers(self, layout: Layout) -> dict[str, int]:
        """See `ParallelTransformer.offers`."""
        ranks = layout.sequence_ranks
        recorded = self._recorded.history(ranks) if self._recorded is not None else NONE
        return self.transformer.offers(layout) | offer_history(ranks, recorded)

    def go_on(self, agreed: Mapping[str, int]) -> None:
        """See `ParallelTransformer.go_on`; keys and values go with the recordings that use them."""
        self.transformer.go_on(agreed)
        ranks = self.mesh.sequence_ranks
        history = agreed_history(ranks, agreed)
        if self._recorded is not None and history is not None and not self._recorded.go_on(ranks, history):
            self.keys.clear()
            self._recorded.begin_anew(self.mesh)
            self._sizes = ()

    def leave(self, mesh: Mesh) -> None:
        """See `ParallelTransformer.leave`."""
        if self._recorded is not None:
            self._recorded.leave(mesh)

    def check_ring(self, layout: Layout) -> None:
        """See `ParallelTransformer.check_ring`."""
        self.transformer.check_ring(layout)

    def forget_recordings(self) -> None:
        """Let go of the recordings and their memory, on this rank alone."""
        if self._recorded is not None:
            self._recorded.lose()

    def forget_runs(self) -> None:
        """Let go of all that runs have left behind; see `ParallelTransformer.forget_runs`."""
        if self._recorded is not None:
            self._recorded.clear()
        self.keys.clear()
        self._sizes = ()
        self._relay.skips = {}
        self._cut.forget()
        self.transformer.forget_runs()

    @property
    def before_compiling(self) -> Callable[[], None]:
        """See `ParallelTransformer`."""
        return self.transformer.before_compiling

    @before_compiling.setter
    def before_compiling(self, tell: Callable[[], None]) -> None:
        self.transformer.before_compiling = tell

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
    ) -> StageOutput:
        """Run the stage's blocks. Collective over the sequence group.

        Args:
            arguments: of the model's forward, for the whole latent; on later stages only shapes, the text, the
                timestep and the like are read from them.
            received: what the stage before returned; nothing for the first.
            patch: the one to compute, or None for all at once.
            slots: how the tokens are split.
            call: which of the step's forwards this is.
            keep: whether keys and values are kept for later steps.
            skips: outputs of the blocks in `skips_taken`.
        """
        self._cut.begin(patch, patches[-1].tokens[1], slots, next(iter(arguments.values())).device)
        index = patch.index if patch else None
        self._place = Place(
            call=call,
            slots=slots,
            ring=self.mesh.coordinate["ring"],
            patch=index,
            with_text=self._cut.with_text,
            keep=keep,
        )
        given: dict[str, Any] = {
            "arguments": dict(arguments),
            "received": dict(received),
            "skips": dict(skips),
            # Whatever else the forward depends on: a recording is replayed for the same text only.
            "noted": f"{self._place} {patches}",
        }
        made = self._run(**given) if self._recorded is None else self._recorded(self.mesh, (), given)
        return StageOutput(**made)

    def _run(
        self, arguments: dict[str, Any], received: Streams, skips: Mapping[int, torch.Tensor], noted: str
    ) -> dict[str, Any]:
        """The forward, of these tensors and what `forward` has noted; returns the arguments of a `StageOutput`."""
        assert self._place is not None
        self._relay.received, self._relay.skips = received, dict(skips)
        made: dict[str, Any] = {}
        try:
            made["output"] = self.transformer.staged(self._place, arguments)
        except StageDone as done:
            made["streams"] = dict(done.streams)
        finally:
            self._relay.received = {}
        return {**made, "skips": {index: self._relay.skips[index] for index in self.skips_given}}

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
                self._recorded.begin_anew(self.mesh)
