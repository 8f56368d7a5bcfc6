"""What a GPU does during a call: its kernels by kind, the gaps between them, and how long the call takes."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

KINDS = {
    "quantisation": r"quantize|dequant|hadamard|convrot",
    "attention": r"sdpa|fmha|flash|cudnn",
    "exchange (peer memory)": r"^_push_|symmetric_memory|memcpy128|PtoP",
    "norm and rotation": r"^_kernel$",
    "matrix products": r"nvjet|gemm|cutlass|gemv|splitK|cublas|dot_kernel|_mm_|triton_tem",
    "exchange (NCCL)": r"nccl",
    "fused elementwise (Triton)": r"^triton_",
    "copies and fills": r"Memcpy|Memset|memcpy|memset",
}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other elementwise")


def milliseconds(call: Callable[[], Any], repeats: int = 8) -> float:
    """Return the median time of a call that is waited for, as a sampler's step with its preview is."""
    times = []
    for _ in range(repeats):
        _wait()
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        call()
        _wait()
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile(call: Callable[[], Any], repeats: int = 3) -> dict[str, Any]:
    """Return milliseconds per call by kind of kernel, the gaps between kernels, and the longest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorder:
        for _ in range(repeats):
            call()
            torch.cuda.synchronize()
    kernels = [
        e for e in recorder.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us()
    ]
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    for event in kernels:
        elapsed = event.time_range.elapsed_us()
        kinds[kind_of(event.name)] += elapsed / 1000 / repeats
        names[event.name].append(elapsed)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:45]
    return {
        "kinds": dict(kinds),
        "busy": busy / 1000 / repeats,
        "launches": len(kernels) / repeats,
        "longest": [
            (name[:110], len(times) / repeats, statistics.mean(times), sum(times) / 1000 / repeats)
            for name, times in longest
        ],
    }
