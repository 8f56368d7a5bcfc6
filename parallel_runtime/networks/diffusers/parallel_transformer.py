"""Wraps a diffusers transformer so that the ranks of a mesh compute one forward together, with the same result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...attention import rebind
from ...attention.choice import resolve_kernel, untouched_kernel
from ...errors import UnsupportedModelError
from ...exchange.head_routes import HeadSharing
from ...mesh.mesh import Mesh
from ...streaming.block_stream import BlockStream
from ..attention_operator import attend_by_kernel
from ..cut_blocks import cut_blocks, keep_whole
from ..facts import unknown_blocks
from ..marked_blocks import find_modules
from ..network import Network
from ..stages import Stages
from ..token_split import TokenSplit
from .lean_imports import untraced_classes
from .spec import ModelSpec


def _look_at(transformer: nn.Module, spec: ModelSpec, attention: str) -> HeadSharing:
    """The self-attention of a transformer with its weights; see `ParallelTransformer`."""
    data, weight = spec.network, next(transformer.parameters())
    if data is None:
        return HeadSharing(1, 0, weight.dtype, weight.device, untouched_kernel(attention, spec.title))
    heads, head_dim = (int(attrgetter(path)(transformer)) for path in (data.heads, data.head_dim))
    kernel = resolve_kernel(attention, weight.device, weight.dtype, head_dim)
    return HeadSharing(heads, head_dim, weight.dtype, weight.device, kernel)


class ParallelTransformer(Network):
    """A transformer of diffusers' that the ranks of a sequence group run together, without gradients; every rank makes
    it with the same arguments, and its weights on its device. Called as the wrapped one is, with whole (not split)
    arguments, alike on all ranks of the group, it returns the whole result on each of them; attributes it does not have
    are the wrapped one's. `attention` is one of config.ATTENTION_BACKENDS, `owned` (start, stop) of the blocks that
    have weights, None: all.

    UnsupportedModelError where the transformer is not what the spec describes, or its attention cannot be exchanged;
    ConfigurationError where the mesh or the attention backend cannot be used here."""

    def __init__(
        self, transformer: nn.Module, spec: ModelSpec, mesh: Mesh, attention: str = "auto", compile: bool = False,
        stream: BlockStream | None = None, owned: tuple[int, int] | None = None,
    ):  # fmt: skip
        heads = _look_at(transformer, spec, attention)
        self.transformer, self.spec = transformer, spec
        split = TokenSplit(mesh)
        super().__init__(heads, spec.token, Stages(transformer, spec.network, split, owned), stream)
        self._signature = inspect.signature(transformer.forward)
        self._timestep: torch.Tensor | None = None
        """Of the forward that runs, until its embedder has it: (batch,), scaled, before the transformer rounds it."""
        lists = [found for path in spec.block_lists for found in find_modules(transformer, (path,)).values()]
        blocks = [block for each in lists for block in each.children()]
        self.check_ring(mesh)
        attending = find_modules(transformer, spec.self_attention)
        reason = unknown_blocks(transformer, spec.cut)
        for names in ((spec.timestep_embedder,), spec.self_attention):
            if names and not find_modules(transformer, names):
                reason = reason or f"it has no module called {' or '.join(names)}"
        if reason:
            what = "This {transformer_class} is not as it is known: {reason}."
            fix = "Install the diffusers version that this pack asks for."
            raise UnsupportedModelError(what, fix, transformer_class=spec.transformer_class, reason=reason)
        # From here on the transformer is changed.
        rebind.apply(attending, attend_by_kernel, traced=compile)
        embedder = transformer.get_submodule(spec.timestep_embedder)
        embedder.register_forward_pre_hook(self._give_timestep, with_kwargs=True)
        if compile:
            torch.compiler.allow_in_graph(list(untraced_classes(transformer)))
            self._compile(transformer, spec.cut)
        cut_blocks(transformer, spec.cut, split)
        for block in blocks if not spec.cut else ():
            keep_whole(block, split)
        self._record()
        if stream is not None:
            stream.wrap(blocks)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped transformer's forward. Collective over the sequence group."""
        return self.record_or_call("forward", *args, **kwargs)

    @torch.no_grad()
    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        return self.record_or_call("predict", x, timestep, dict(conditioning))

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.spec.output_shape(x_shape, self.config)

    def call_at_once(self, convention: str, *args: Any, **kwargs: Any) -> Any:
        """What `forward` and `predict` (their names are the convention) do; all of it is one recorded launch."""
        if convention == "forward":
            return self._run(*args, **kwargs)
        x, timestep, conditioning = args
        arguments = self.spec.to_transformer(x, timestep, config=self.config, **conditioning)
        return self.spec.from_transformer(self._run(**arguments, return_dict=False)[0], x)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        timestep = self._signature.bind(*args, **kwargs).arguments.get("timestep")
        self._timestep = None if timestep is None else timestep.to(torch.float32) * self.spec.timestep_scale
        with self._running():
            return self.transformer(*args, **kwargs)

    def _give_timestep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook (with_kwargs) of the embedder: its first argument becomes the exact timestep. Once per
        forward: where the embedder is the bare sinusoid, models call it again for the guidance."""
        timestep, self._timestep = self._timestep, None
        if timestep is None:
            return None
        if args:
            return (timestep, *args[1:]), kwargs
        return args, {**kwargs, next(iter(inspect.signature(module.forward).parameters)): timestep}

    def forget_runs(self) -> None:
        super().forget_runs()
        self._timestep = None

    __call__ = forward

    def __getattr__(self, name: str) -> Any:
        if name == "transformer":  # not set yet: construction failed, or a copy is being made
            raise AttributeError(name)
        return getattr(self.transformer, name)


parallelize = ParallelTransformer  # let the ranks of a mesh run a transformer together
