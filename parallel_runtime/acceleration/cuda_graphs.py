"""One forward as a CUDA graph: launched once while it is recorded, replayed with new values of its tensors."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LONG = 0.2
"""Seconds. To record a forward runs it three times more, and keeps its memory: 0.7 s for two rows of FLUX.1, 5 for
LTX-2, in each size. Where the GPU hides the launches, a recording gains those of a prompt's first step, 0.04 s."""
_LAUNCHED_IN = 0.75
"""Part of the GPU's time within which the host has launched it all; where it waits for the GPU now and then, or a long
queue is full, it takes longer than launching does."""

Replay = Callable[[list[torch.Tensor]], Any]
"""New values of the tensors among the arguments -> output, the caller's own."""


class CudaGraphs:
    """Records forwards. All recordings of one share their memory."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._replays: weakref.WeakSet[Replay] = weakref.WeakSet()  # that somebody still has

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One, as one pool, for all recordings: they never run at the same time and keep nothing between two replays,
        and memory is given out again on the stream alone that it was taken on."""
        return torch.cuda.Stream()

    def rehearse(self, call: Callable[[list[torch.Tensor]], Any], static: list[torch.Tensor]) -> Any:
        """Return `call(static)`, run on the stream that will record it: libraries take memory for a stream when they
        first see it (comfy-kitchen's int8 products do), which ends a recording."""
        if not static[0].is_cuda:
            return call(static)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = call(static)
        current.wait_stream(self._stream)
        return output

    def record(
        self, call: Callable[[list[torch.Tensor]], Any], static: list[torch.Tensor], made_outside: Callable[[], Any]
    ) -> Replay:
        """Record `call(static)` as a CUDA graph; `made_outside`, see `RecordedForward`, is asked when it has run.
        RuntimeError: the forward does something that cannot be recorded, or memory ran out."""
        if not self._replays:
            self._pool = torch.cuda.graph_pool_handle()  # a pool is gone with the last recording in it
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), captured(self._pool) as graph:
            output = call(static)
        torch.cuda.current_stream().wait_stream(self._stream)
        outside = made_outside()

        def replay(tensors: list[torch.Tensor], outside: Any = outside) -> Any:
            for old, new in zip(static, tensors, strict=True):
                old.copy_(new)
            graph.replay()
            return pytree.tree_map_only(torch.Tensor, torch.clone, output)

        self._replays.add(replay)
        return replay


@contextlib.contextmanager
def captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """What is launched inside goes into a graph, and Python's collector does not run: what that finds may be another
    model's engine or graphs, whose end gives memory back to the driver. That is not allowed while a stream records: the
    recording would fail by no fault of its forward."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        # thread_local: NCCL's watchdog thread asks CUDA for the state of earlier collectives meanwhile.
        with _left_if_it_fails(pool):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            with _left_if_it_fails(pool):
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _left_if_it_fails(pool: Any) -> Iterator[None]:
    """Torch's allocator is told that the recording is over: what raises here does not tell it. It would refuse to let
    unused memory go, and keep what several streams had, for as long as the process lives."""
    try:
        yield
    except RuntimeError:
        with contextlib.suppress(RuntimeError, AttributeError):  # it knows already, or another torch
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


def clear_workspaces() -> None:
    """Let go of memory that PyTorch keeps for cuBLAS, where this torch can. No recording that was made with it may be
    replayed any more."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], bool]]:
    """Run something on the current stream; return what it gives, and what tells whether it was long, as soon as the GPU
    is through."""
    if device.type != "cuda":
        return run(), lambda: False
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    begin.record()
    output = run()
    end.record()
    launching = time.perf_counter() - started

    def was_long() -> bool:
        end.synchronize()
        return is_long(launching, begin.elapsed_time(end) / 1000)

    return output, was_long


def is_long(launching: float, computing: float) -> bool:
    """Whether launching is hidden behind what a GPU computes, and that takes long; both in seconds."""
    return computing >= _LONG and launching <= _LAUNCHED_IN * computing
