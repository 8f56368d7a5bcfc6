"""What the engine runs a model's calls with: a network over a mesh, whoever wrote its class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..acceleration.recordings import RecordedForward
from ..attention.choice import check_ring
from ..attention.kernels import KERNELS
from ..exchange.head_routes import HeadSharing
from ..mesh.agreement import NONE, agreed_history, offer_history
from ..mesh.mesh import Layout, Mesh
from ..requests.facts import MachineFacts
from ..streaming.block_stream import BlockStream
from ..switches import is_on
from .attention_operator import attending
from .block_attention import BlockAttention, Suited
from .gathered_inputs import GatheredInputs
from .stages import Stages
from .tables.blocks import Blocks

if TYPE_CHECKING:
    from .compiled_blocks import CompiledBlocks


class Network:
    """A network whose forward all ranks of a mesh compute together, or those of a stage. `heads` is its self-attention,
    `token` the latent positions along one side of a token; `stream`, if not None, brings blocks' weights."""

    rows_together = False  # rows of a batch cannot be told apart: every rank computes all of them

    def __init__(
        self, heads: HeadSharing, token: int, stages: Stages, stream: BlockStream | None, suited: Suited | None = None
    ):
        self.stream = stream
        self.attention = heads.kernel
        self.token = token
        self.stages = stages
        self._heads = heads
        self._split = stages.split
        self._attend = BlockAttention(KERNELS[heads.kernel], stages.split, suited)
        in_words = heads.head_dim * heads.dtype.itemsize % 8 == 0  # as peers exchange heads (exchange/peer_exchange.py)
        self._peers = heads if is_on("peers") and in_words else None
        # Of weights that come block by block, those of modulation layers would be read before they are there.
        self._modulates = stream is None and is_on("modulation")
        self._compiled: CompiledBlocks | None = None
        self._recorded: RecordedForward | None = None
        self._runs_in_a_ring = False

    def _compile(self, network: nn.Module, lists: Iterable[Blocks]) -> None:
        """Have the blocks run compiled; each is compiled when it first runs."""
        from .compiled_blocks import CompiledBlocks  # imports much of torch that nothing else needs

        numbers = {each for blocks in lists for each in {*blocks.segments, *blocks.border} - set(blocks.sorts)}
        numbers |= {f".{each}" for blocks in lists for each in blocks.counts}
        self._compiled = CompiledBlocks(network, self._attend, sorted(numbers))

    def _record(self, probe: Any = None) -> None:
        """Have forwards that repeat become CUDA graphs, on a GPU; see `RecordedForward`."""
        if self._heads.device.type == "cuda" and is_on("recordings"):
            other_way = GatheredInputs(self._split.tokens, self._refused) if is_on("gather") else None
            self._recorded = RecordedForward(self.call_at_once, self._split.read, probe, other_way)

    def _refused(self) -> list[str]:
        """Blocks that run as they are on this rank, as they could not be compiled."""
        return [] if self._compiled is None else [each.__qualname__ for each in self._compiled.methods.refused]

    def predict(self, x: Tensor, timestep: Tensor, conditioning: Mapping[str, Any]) -> Tensor:
        """The prediction of one call in ComfyUI's convention, shaped as the latent part of x, in the model's dtype.
        Collective over the sequence group. UnsupportedModelError where the network did not run as its data says. x is
        (B, C, ...), or (B, 1, N) of several latents one after the other, whose shapes the conditioning names; the
        timestep (B,) or (B, frames), float32."""
        raise NotImplementedError

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that `predict` gives for an x of that shape."""
        raise NotImplementedError

    @property
    def mesh(self) -> Mesh:
        """The one at hand."""
        return self._split.mesh

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh from the next call on, on every rank; nothing changes where `check_ring` refuses it."""
        self.check_ring(mesh)
        self._split.set_mesh(mesh)

    def check_ring(self, layout: Layout) -> None:
        """ConfigurationError for a layout with a ring for which the attention backend is not made. No collective."""
        heads = self._heads
        if layout.plan.ring > 1 and layout.plan.pipe == 1 and not self._runs_in_a_ring:
            check_ring(self.attention, heads.device, heads.dtype, heads.head_dim)
            self._runs_in_a_ring = True  # found by running the kernel: once is enough

    def call_at_once(self, *args: Any, **kwargs: Any) -> Any:
        """What a call does, without recording."""
        raise NotImplementedError

    def record_or_call(self, *args: Any, at_once: bool = False, **kwargs: Any) -> Any:
        """Call, in the way that is fastest by now; a stage does not record. Collective over the sequence group."""
        with self.stream.reading() if self.stream is not None else contextlib.nullcontext():
            if self._recorded is None or self.stages.now is not None or at_once:
                return self.call_at_once(*args, **kwargs)
            compiled = self._compiled is not None and self._compiled.in_use
            return self._recorded(self.mesh, args, kwargs, compiled)

    def rows_go_apart(self, rows: int, begins: bool) -> bool:
        """Whether so many rows go one by one, as of `CompiledBlocks`; never where other ranks have these rows, as each
        may have run other numbers before, weights stream, or scales are of a whole batch."""
        alone = self.mesh.sequence is None and self.stream is None and not self._split.scales_by_input
        return alone and self._compiled is not None and self._compiled.rows_go_apart(rows, begins)

    @contextlib.contextmanager
    def _running(self, functions: bool = False, compiles: bool = True) -> Iterator[None]:
        """What must hold around a forward; `functions` of nodes act in it, and blocks run compiled if it `compiles`."""
        split, compiled = self._split, self._compiled if compiles else None
        split.begin(self._attend, None if compiled is None else compiled.run, self._peers, functions)
        shares = self._modulates and not functions and self.stages.now is None
        split.modulation.begin(self.mesh if shares else None)
        with contextlib.ExitStack() as held:
            held.callback(split.end)
            held.enter_context(attending(self._attend.at, self._attend.over_shared, self._attend.over_host))
            if compiled is not None:
                held.enter_context(compiled.around_forward())
            if self.stream is not None:
                held.enter_context(self.stream.forward())
            yield

    def offers(self, layout: Layout) -> dict[str, int]:
        """What this rank has recorded over the layout's sequence group, and tells of its graphs, for `go_on`."""
        ranks = layout.sequence_ranks
        recorded = self._recorded.history(ranks) if self._recorded is not None else NONE
        graphs = self._compiled.offers() if self._compiled is not None else {}
        return offer_history(ranks, recorded) | graphs

    def go_on(self, agreed: Mapping[str, int], before_compiling: Callable[[], None], machine: MachineFacts) -> None:
        """Use recordings over the mesh at hand, and graphs, as all ranks can by what all of them `offer`; before a
        request's first forward. `before_compiling` is called once, before the first that may compile; `machine`, alike
        on all ranks, tells what is sooner."""
        self._split.tokens.machine = machine
        history = agreed_history(self.mesh.sequence_ranks, agreed)
        if self._recorded is not None and history is not None:
            self._recorded.go_on(self.mesh.sequence_ranks, history)
        if self._compiled is not None:
            self._compiled.go_on(agreed)
            self._compiled.before_compiling = before_compiling

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone."""
        if self._recorded is not None:
            self._recorded.leave(mesh)

    def forget_recordings(self) -> None:
        """Let go of the recordings and their memory, on this rank alone."""
        if self._recorded is not None:
            self._recorded.lose()

    def forget_runs(self) -> None:
        """Let go of what runs left: recordings, layouts, outputs of the last forward. What is compiled stays."""
        if self._recorded is not None:
            self._recorded.clear()
        self._split.forget()
        if self.stages.now is not None:
            self.stages.now.forget()
