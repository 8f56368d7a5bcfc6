"""Wraps a diffusers transformer so that the ranks of a mesh compute one forward together, with the same result."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..acceleration.compile_ahead import CompileAhead
from ..acceleration.compiler_link import ProcessCompiler
from ..acceleration.compiler_messages import ToCompile
from ..acceleration.peer_sharing import PeerSharing
from ..acceleration.recordings import RecordedForward
from ..attention import rebind
from ..attention.choice import check_ring, resolve_kernel, untouched_kernel
from ..attention.kernels import KERNELS
from ..attention.projections import place_side_by_side
from ..attention.rotary import exchange_rotary
from ..errors import ConfigurationError, UnsupportedModelError
from ..mesh.agreement import COMPILED, NONE, agreed_history, offer_history
from ..mesh.mesh import Layout, Mesh, single_rank_mesh
from ..switches import is_on
from .absent_blocks import is_absent, stages_of
from .diffusers.spec import ModelSpec
from .marked_blocks import pulse_of
from .modulation import find_modulations
from .module_paths import find_modules, first_blocks, matches
from .sequence import SequenceSplit, gather_hook, output_split_hook, split_hook
from .sequence_attention import SequenceAttention
from .stale_keys import Place, StaleKeys
from .timestep import ExactTimestep

if TYPE_CHECKING:
    from ..acceleration.compiled_blocks import CompiledBlocks


def parallelize(
    transformer: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    attention: str = "auto",
    compile: bool = False,
    record: bool = True,
    share: bool = True,
    keys: StaleKeys | None = None,
    ahead: str = "",
) -> ParallelTransformer:
    """Let the ranks of `mesh` run `transformer` together; call it on every rank with the same arguments.

    Args:
        transformer: a diffusers transformer with its weights on this rank's device, whole on every rank.
        spec: the model as data.
        mesh: may be changed later with `ParallelTransformer.set_mesh`; one rank needs no torch.distributed.
        attention: one of config.ATTENTION_BACKENDS.
        compile: regional torch.compile of the blocks in `spec.block_lists`.
        record: on a GPU, forwards that repeat become CUDA graphs (recordings.py). Nothing to gain on a CPU.
        share: GPUs of one host that can write to each other's memory exchange heads in this way (peer_exchange.py).
        keys: of a stage of a pipeline, which runs with `ParallelTransformer.staged`.
        ahead: with `compile`, the module that a process of its own runs to compile the blocks (compiler_link.py); they
            run as they are until it has. Empty: the first forward compiles.

    Raises:
        UnsupportedModelError: the transformer is not what the spec describes, or its attention cannot be exchanged.
        ConfigurationError: the mesh or the attention backend cannot be used here.
    """
    return ParallelTransformer(transformer, spec, mesh, attention, compile, record, share, keys, ahead)


class ParallelTransformer:
    """A transformer whose forward is computed by all ranks of a sequence group; see `parallelize`.

    Called as the wrapped transformer is, with whole (not split) arguments, alike on all ranks of the group, and
    returns the whole result on each of them. Attributes it does not have are the wrapped transformer's.
    Inference only: no gradients flow.
    """

    def __init__(
        self,
        transformer: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        attention: str,
        compile: bool,
        record: bool,
        share: bool,
        keys: StaleKeys | None,
        ahead: str,
    ):
        _check_class(transformer, spec)
        self.transformer = transformer
        self.spec = spec
        self.mesh = mesh
        self.compiled = compile
        device, dtype, head_dim = _attention_traits(transformer)
        if spec.splits_sequence:
            self.attention = resolve_kernel(attention, device, dtype, head_dim, _measurements())
        else:
            self.attention = untouched_kernel(attention, spec.title)
        self._runs_in_a_ring = False
        self._keys = keys
        self.check_mesh(mesh)
        self._recorded: RecordedForward | None = None
        if record and device.type == "cuda" and is_on("recordings"):
            self._recorded = RecordedForward(
                self.call_at_once, made_outside=self.made_outside, pulse=pulse_of(transformer, spec)
            )
        self._signature = inspect.signature(transformer.forward)
        peers = None
        if share and spec.splits_sequence and is_on("peers"):
            peers = PeerSharing(*self.attention_traits())
        self._split = SequenceSplit(mesh, spec.attended, peers)
        self._timestep = ExactTimestep(spec.timestep_scale)
        blocks = list(_blocks(transformer, spec)) if compile else []
        self._modulations = find_modulations(transformer, spec)
        # From here on the transformer is changed, and nothing refuses any more but `apply`, which comes first.
        attention_modules = _self_attention(transformer, spec)
        self._attend = SequenceAttention(KERNELS[self.attention], self._split, keys)
        if keys is not None:
            keys.attends[True] = self._attend.attend_slots
        others = self._attention_over_parts(attention_modules, keys)
        self._rebound = rebind.apply(attention_modules, self._attend, others)
        # On a CPU the weights may be the memory-mapped file itself, which they would leave.
        self._together = compile and device.type == "cuda"
        if self._together:
            place_side_by_side(attention_modules.values())
        self._attention_modules = attention_modules
        self._handles = self._register_hooks()
        self._present = [block for block in blocks if not is_absent(block)]
        self._compiled: CompiledBlocks | None = None
        self._runs_compiled = False
        self.before_compiling: Callable[[], None] = lambda: None
        """Called once, before the first forward that may compile."""
        self._announced = False
        self._ahead: CompileAhead | None = None
        if compile and ahead:
            compiler = ProcessCompiler(ahead, self._to_compile, self._one_of_each(), self._split.peer_bytes)
            self._ahead = CompileAhead(compiler)
        elif compile:
            self.use_compiled(True)

    def _to_compile(self) -> ToCompile:
        device, dtype, _ = _attention_traits(self.transformer)
        joined = dist.is_initialized()
        return ToCompile(
            self.spec.name,
            dict(self.config),
            str(dtype).removeprefix("torch."),
            str(device),
            self.attention,
            dist.get_rank() if joined else 0,
            dist.get_world_size() if joined else 1,
        )

    def _one_of_each(self) -> int:
        """Bytes of the transformer with one block of each kind."""
        firsts = first_blocks(self.transformer, self.spec)
        others = {id(weight) for block, first in firsts.items() if block is not first for weight in block.parameters()}
        return sum(weight.nbytes for weight in self.transformer.parameters() if id(weight) not in others)

    def attention_traits(self) -> tuple[int, int, torch.dtype, torch.device, str]:
        """What PeerSharing is made of."""
        device, dtype, head_dim = _attention_traits(self.transformer)
        return _heads(self.transformer, self.spec), head_dim, dtype, device, self.attention

    def exchange_through(self, peers: PeerSharing | None) -> None:
        """Take other buffers for the exchange of heads."""
        self._split.exchange_through(peers)

    def _attention_over_parts(self, paths: Iterable[str], keys: StaleKeys | None) -> dict[str, SequenceAttention]:
        found: dict[str, SequenceAttention] = {}
        for pattern, attended in self.spec.attended_by.items():
            # Parts that some attention modules are about are image tokens without the text.
            of_image = keys.of_image() if keys is not None else None
            attention = SequenceAttention(KERNELS[self.attention], self._split.among(attended), of_image)
            if keys is not None:
                keys.attends[False] = attention.attend_slots
            found |= {path: attention for path in paths if matches(path, pattern)}
        return found

    def _register_hooks(self) -> list[Any]:
        find = self.transformer.get_submodule
        handles = [
            find(self.spec.timestep_embedder).register_forward_pre_hook(self._timestep.hook, with_kwargs=True),
        ]
        for path, dims in self.spec.sequence_inputs.items():
            hook = split_hook(self._split, find(path), dict(dims))
            handles.append(find(path).register_forward_pre_hook(hook, with_kwargs=True))
        for path, dim in self.spec.sequence_splits.items():
            hook = output_split_hook(self._split, path, dim)
            handles.append(find(path).register_forward_hook(hook))
        for path, dim in self.spec.sequence_outputs.items():
            handles.append(find(path).register_forward_hook(gather_hook(self._split, dim)))
        for path, modulation in self._modulations.items():
            modulation.set_mesh(self.mesh)
            handles.append(find(path).register_forward_hook(modulation.hook))
        return handles

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh from the next forward on, with the same weights. Costs nothing; every rank calls it.

        Raises:
            ConfigurationError: see `check_mesh`.
        """
        if mesh is self.mesh:
            return
        self.check_mesh(mesh)
        self.mesh = mesh
        self._split.set_mesh(mesh)
        for modulation in self._modulations.values():
            modulation.set_mesh(mesh)

    def use_compiled(self, compiled: bool) -> None:
        """Run the blocks compiled, or as they are, from the next forward on; all ranks of a sequence group alike.

        What is not compiled yet is compiled when it first runs. The results are equal up to rounding.
        """
        if compiled == self._runs_compiled:
            return
        self._runs_compiled = compiled
        if self._compiled is not None:
            self._compiled.use(compiled)
            return
        # Imports much of torch that nothing else needs.
        from ..acceleration.compiled_blocks import CompiledBlocks
        from ..acceleration.compiler import allow_in_graph
        from .diffusers.lean_imports import untraced_classes

        allow_in_graph(untraced_classes(self.transformer))
        exchange_rotary(self._attention_modules.values())
        self._compiled = CompiledBlocks(self._present, self._together)

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh that this wrapper does not run, and change nothing. No collective.

        Raises:
            ConfigurationError: stages of which this is none, tokens that cannot be split, or see `check_ring`.
        """
        if mesh.plan.sequence > 1 and not self.spec.splits_sequence:
            raise ConfigurationError(
                f"The plan asks for {mesh.plan}, and the tokens of {self.spec.title} cannot be split.",
                "Set ulysses and ring to 1; cfg and data share out CFG branches and pictures.",
            )
        if mesh.plan.pipe > 1 and self._keys is None:
            raise ConfigurationError(
                f"The plan asks for pipe {mesh.plan.pipe}, and the whole model is loaded.", "Queue the prompt again."
            )
        self.check_ring(mesh)

    def check_ring(self, layout: Layout) -> None:
        """Refuse a layout with a ring for which the attention backend is not made. No collective.

        Raises:
            ConfigurationError: with the backends that are.
        """
        if layout.plan.ring > 1 and not self._runs_in_a_ring:
            check_ring(self.attention, *_attention_traits(self.transformer))
            self._runs_in_a_ring = True  # found by running the kernel: once is enough

    def forget_recordings(self) -> None:
        """Let go of the recordings and their memory, on this rank alone."""
        if self._recorded is not None:
            self._recorded.lose()

    def forget_runs(self) -> None:
        """Let go of all that runs have left behind: recordings, layouts, outputs of the last forward. What is compiled
        stays."""
        if self._recorded is not None:
            self._recorded.clear()
        if self._ahead is not None:
            self._ahead.give_up()
        self._split.forget()
        self._timestep.begin(None)
        for modulation in self._modulations.values():
            modulation.forget()

    def offers(self, layout: Layout) -> dict[str, int]:
        """What this rank has recorded over the layout's sequence group, for `go_on`."""
        ranks = layout.sequence_ranks
        recorded = self._recorded.history(ranks) if self._recorded is not None else NONE
        compiled = self._ahead.history(ranks) if self._ahead is not None else NONE
        return offer_history(ranks, recorded) | offer_history(ranks, compiled, COMPILED)

    def go_on(self, agreed: Mapping[str, int]) -> None:
        """Use recordings over the mesh at hand only where all ranks have them; before a request's first forward.

        Args:
            agreed: of all ranks' `offers`.
        """
        history = agreed_history(self.mesh.sequence_ranks, agreed)
        if self._recorded is not None and history is not None:
            self._recorded.go_on(self.mesh.sequence_ranks, history)
        compiled = agreed_history(self.mesh.sequence_ranks, agreed, COMPILED)
        if self._ahead is not None and compiled is not None:
            self._ahead.go_on(self.mesh.sequence_ranks, compiled)

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone."""
        if self._recorded is not None:
            self._recorded.leave(mesh)

    def leave_world(self) -> None:
        """Let go of all that is of several ranks, whose groups will be gone. What this rank has by itself stays."""
        self.set_mesh(single_rank_mesh())
        if self._recorded is not None:
            self._recorded.leave_world()
        if self._ahead is not None:
            self._ahead.leave_world()

    def unwrap(self) -> nn.Module:
        """Undo everything and return the transformer as it was. The wrapper is of no use afterwards."""
        if self._recorded is not None:
            self._recorded.clear()
        for handle in self._handles:
            handle.remove()
        self._rebound.undo()
        for modulation in self._modulations.values():
            modulation.undo()
        if self._compiled is not None:
            self._compiled.undo()
        if self._ahead is not None:
            self._ahead.give_up()
        self._handles, self._compiled = [], None
        return self.transformer

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped transformer's forward. Collective over the sequence group."""
        return self._record_or_call("forward", *args, **kwargs)

    @torch.no_grad()
    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        """One call in ComfyUI's convention, through the family's adapter. Collective over the sequence group.

        Where forwards are recorded, the adapter's part is recorded with them: all of it is one launch.

        Args:
            x: (B, C, ...); timestep: (B,) float32; conditioning: context and the family's extras.

        Returns:
            The prediction, shaped like the latent part of x, in the model's dtype.
        """
        return self._record_or_call("predict", x, timestep, dict(conditioning))

    def _record_or_call(self, *args: Any, **kwargs: Any) -> Any:
        if self._ahead is None:
            return self._launch(args, kwargs)

        def call(compiled: bool) -> Any:
            self.use_compiled(compiled)
            return self._launch(args, kwargs)

        return self._ahead.run(self.mesh, args, kwargs, call)

    def _launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorded is not None:
            return self._recorded(self.mesh, args, kwargs, self._runs_compiled)
        return self.call_at_once(*args, **kwargs)

    def call_at_once(self, convention: str, *args: Any, **kwargs: Any) -> Any:
        """What `forward` and `predict` (their names are the convention) do, without recording."""
        return self._predict(*args) if convention == "predict" else self._run(*args, **kwargs)

    def _predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: dict[str, Any]) -> torch.Tensor:
        arguments = self.spec.adapter.to_transformer(x, timestep, config=self.config, **conditioning)
        output = self._run(**arguments, return_dict=False)[0]
        return self.spec.adapter.from_transformer(output, x)

    def made_outside(self) -> list[Any]:
        """What the last forward read besides arguments and weights; a recording keeps it alive."""
        return self._split.read

    @torch.no_grad()
    def staged(self, place: Place, arguments: Mapping[str, Any]) -> Any:
        """Run a stage's forward (pipefusion.stage), whose attention goes over kept keys and values too."""
        assert self._keys is not None
        self._keys.begin(place)
        self._begin(arguments.get("timestep"))
        if place.patch is None:
            self._split.deal(place.slots.shares(), stages_of(self.spec).text)
        return self._forward(**arguments, return_dict=False)[0]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._begin(self._signature.bind(*args, **kwargs).arguments.get("timestep"))
        return self._forward(*args, **kwargs)

    def _begin(self, timestep: torch.Tensor | None) -> None:
        self._split.begin()
        self._timestep.begin(timestep)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled if self._runs_compiled else None
        if compiled is not None and not self._announced:
            self._announced = True
            self.before_compiling()
        with compiled.compiling() if compiled is not None else contextlib.nullcontext():
            return self.transformer(*args, **kwargs)

    __call__ = forward

    def __getattr__(self, name: str) -> Any:
        if name == "transformer":  # not set yet: construction failed, or a copy is being made
            raise AttributeError(name)
        return getattr(self.transformer, name)


def _check_class(transformer: nn.Module, spec: ModelSpec) -> None:
    if type(transformer).__name__ != spec.transformer_class:
        raise UnsupportedModelError(
            f"A {type(transformer).__name__} cannot run as {spec.title}, which is a {spec.transformer_class}.",
            "Choose a model file of a supported family.",
        )
    spec.check_modules(dict(transformer.named_modules()))


def _measurements() -> Path | None:
    """The folder that keeps measured times of attention kernels between processes; the pool says."""
    folder = os.environ.get("PARALLEL_DIT_STATE")
    return Path(folder) / "measured" if folder else None


def _attention_traits(transformer: nn.Module) -> tuple[torch.device, torch.dtype, int]:
    """Return device, dtype and head dim of the transformer's attention."""
    parameter = next(transformer.parameters())
    return parameter.device, parameter.dtype, getattr(transformer.config, "attention_head_dim", 64)


def _heads(transformer: nn.Module, spec: ModelSpec) -> int:
    config: Any = transformer.config
    return spec.heads(config)


def _self_attention(transformer: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    if not spec.splits_sequence:
        return {}
    found = find_modules(transformer, spec.self_attention)
    if not found:
        raise UnsupportedModelError(
            f"No attention module of {spec.transformer_class} has a name like {', '.join(spec.self_attention)}.",
            "Install the diffusers version that this pack asks for.",
        )
    return found


def _blocks(transformer: nn.Module, spec: ModelSpec) -> Iterator[nn.Module]:
    for pattern in spec.block_lists:
        for blocks in find_modules(transformer, (pattern,)).values():
            yield from blocks.children()
