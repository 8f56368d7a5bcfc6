"""A VAE of ComfyUI's that several ranks run together, by rows or by its own tiles, or the first of them alone."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..acceleration.channels_last import length_norms
from ..mesh.agreement import failing_at_the_next_vote
from ..networks.shares import split_sizes
from ..replaced import replaced
from .families import Half, find_half, find_tiles
from .row_functions import RowFunctions
from .rows import Rows
from .tiles import cut, shared_tiles

if TYPE_CHECKING:
    from .compiled_decoder import CompiledDecoder

LEAST = 2  # rows of a latent that a rank has at least: a picture that is mirrored at its border needs two
CHUNK = 128 << 20
"""Bytes that ComfyUI computes at once on a large GPU. On every rank alike, whatever it has: it decides what is sent."""
Run = Callable[[torch.Tensor], torch.Tensor]  # a rank's part of a half: its rows -> its rows of what is made


def shared_ranks(vae: nn.Module, name: str, shape: Sequence[int], unit: int, ranks: int) -> int:
    """How many ranks, all or one, run an "encoder" or "decoder" on this shape; `unit` rows are one of the latent."""
    if find_tiles(vae, name):
        return ranks if len(cut(vae, name, torch.empty(shape, device="meta"))) > 1 else 1
    rows = shape[-2]
    if find_half(vae, name) is None or len(shape) < 4 or rows % unit or rows // unit < LEAST * ranks:
        return 1
    return ranks


def run_half(
    vae: nn.Module, name: str, x: torch.Tensor, *, unit: int, ranks: int, rank: int, group: dist.ProcessGroup | None,
    options: Mapping[str, Any] = MappingProxyType({}), tried: bool = False, fused: bool = True,
    now_and_then: Callable[[], None] = lambda: None, compiled: Callable[[], CompiledDecoder] | None = None,
    through: Callable[[Run, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Encode or decode. Each of the ranks calls it with the same tensor; the first returns what the VAE alone would,
    the others None. PeerFailedError: another rank could not run its part.

    Args:
        x: empty afterwards where several ranks share it: each keeps its own rows, and the memory of the whole is free.
        unit: see `shared_ranks`, which says how many ranks there are; they talk over `group`.
        tried: memory for it is there; else the ranks vote before each exchange on whether all are well.
        fused: whether channels_last.py's kernels may be used, on every rank alike.
        now_and_then: called by all ranks at the same places; what it raises ends the run there. Not in a recording.
        compiled: gives what compiles blocks where the half has such, on every rank alike; None: they run as they are.
        through: what runs the part of a rank that shares the rows with others, if not the rank itself.
    """
    half, part = find_half(vae, name), getattr(vae, name, vae)
    with failing_at_the_next_vote(None if tried else group) as vote:
        if tiles := find_tiles(vae, name):
            with shared_tiles(vae, name, tiles, Rows(rank, (1,) * ranks, vote, group), now_and_then, compiled):
                done = _call(vae, name, x, None, options)
            return done if rank == 0 else None

        calls = _unless_recorded(x.is_cuda, vote, now_and_then)

        def run(own: torch.Tensor) -> torch.Tensor:
            with RowFunctions(half, rows, calls, fused) as functions, _changed(part, half, rows, functions):
                return _call(vae, name, functions.arranged(own), half, options)

        shares = split_sizes(x.shape[-2] // unit, ranks) if ranks > 1 else [1]
        rows = Rows(rank if ranks > 1 else 0, tuple(unit * share for share in shares), vote, group)
        if ranks == 1:
            return run(x)
        own = rows.cut(x)
        x.set_()  # type: ignore[call-overload]  # whoever called holds it, too
        return rows.gather(run(own) if through is None else through(run, own), to=0)


def _unless_recorded(on_gpu: bool, *calls: Callable[[], object]) -> Callable[[], None]:
    """These calls, one after the other, none while a CUDA graph is recorded."""

    def call() -> None:
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):
            for each in calls:
                each()

    return call


def _call(vae: Any, name: str, x: torch.Tensor, half: Half | None, options: Mapping[str, Any]) -> torch.Tensor:
    if name == "decoder" and getattr(vae, "comfy_has_chunked_io", False):
        # Else it would bring the picture to the host piece by piece, where ranks cannot put it together.
        dtype = torch.float32 if half is None else x.dtype
        options = {**options, "output_buffer": x.new_empty(vae.decode_output_shape(x.shape), dtype=dtype)}
    done: torch.Tensor = (vae.decode if name == "decoder" else vae.encode)(x, **options)
    return done


@contextlib.contextmanager
def _changed(part: nn.Module, half: Half | None, rows: Rows, functions: RowFunctions) -> Iterator[None]:
    """Inside, norms that are modules of ComfyUI's are computed by `functions`, and attention is over all rows."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        both = rows.gather(torch.cat((key, value), 1))
        assert both is not None
        # Channels last in memory, or no kernel but the one that keeps all products takes one head of 512 channels.
        tokens = (each.flatten(2).transpose(1, 2).unsqueeze(1) for each in (query, *both.chunk(2, 1)))
        q, k, v = (each.contiguous() for each in tokens)
        return F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(query.shape)

    with contextlib.ExitStack() as stack:
        for module in length_norms(part) if half is not None else ():
            stack.enter_context(replaced(module, "forward", partial(functions.length_norm, module, module.forward)))
        if half is None or not rows.shared:
            yield
            return
        for module in part.modules():
            for name in ("optimized_attention", "optimized_vae_attention"):
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, attend))
        code = sys.modules[type(part).__module__]
        if half.chunks:
            # In proportion to the rows: as many chunks of as many frames as on one rank.
            share = Fraction(CHUNK * rows.shares[rows.rank], sum(rows.shares))
            stack.enter_context(replaced(code, half.chunks, lambda device: share))
        # Ranks with unlike shares would compute more or fewer parts, and exchange as often.
        for owner, name in itertools.product((code, *part.modules()), half.limits):
            if name in vars(owner):
                stack.enter_context(replaced(owner, name, math.inf))
        yield
