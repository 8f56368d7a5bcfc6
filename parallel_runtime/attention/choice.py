"""Which attention kernel runs: by name, or the fastest on this machine, measured once."""

from __future__ import annotations

import logging
import os
import warnings
from functools import cache
from pathlib import Path

import torch

from .. import measured
from ..config import COMFYUIS
from ..errors import ConfigurationError, first_line
from .kernels import KERNELS, PACKAGES, Attend, AttendWithLse, is_missing

log = logging.getLogger(__name__)

_PROBE_TOKENS = 77  # odd on purpose: a kernel that only takes multiples of 8 must not be chosen
_CANDIDATES = ("cudnn", "flash3", "flash", "efficient")  # what `auto` measures, the preferred first; none is lossy
_MEASURED_SHAPE = (1, 4608, 24)  # batch, tokens, heads: FLUX.1 at 1024²
_WARM_CALLS, _TIMED_CALLS = 3, 5
_SET_AUTO = "Set the attention backend to auto."
_TIE = 1.03  # a later candidate must be so much faster, or the choice would change from machine start to machine start


def resolve_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the KERNELS key that `name`, one of config.ATTENTION_BACKENDS, stands for: `auto` for the fastest lossless
    one on this GPU. ConfigurationError where it is not installed or cannot run here, found by running it on a few
    tokens. Ranks choose for themselves: kernels differ in rounding alone, and none takes part in an exchange."""
    if name == COMFYUIS:
        what = "Attention ComfyUI is a function of ComfyUI's own networks, and this network is diffusers'."
        raise ConfigurationError(what, _SET_AUTO)
    if name == "auto":
        return _fastest(device, dtype, head_dim) if device.type == "cuda" else "sdpa"
    if is_missing(name):
        module, title = PACKAGES[name]
        what = "Attention backend {name} needs the Python package {module}, which is not installed."
        fix = "Install {title}, or set the attention backend to auto."
        raise ConfigurationError(what, fix, name=repr(name), module=module, title=title)
    if (refusal := _refusal(KERNELS[name].attend, device, dtype, head_dim)) is not None:
        what = "Attention backend {name} cannot run on {where} ({refusal})."
        where = _where(device, dtype, head_dim)
        raise ConfigurationError(what, _SET_AUTO, name=repr(name), where=where, refusal=refusal)
    return name


def untouched_kernel(name: str, title: str) -> str:
    """The KERNELS key where attention stays as diffusers has it; ConfigurationError where another was asked for."""
    if name not in ("auto", "sdpa"):
        what = "{title} runs with PyTorch's own attention, not with {name}."
        raise ConfigurationError(what, "Set the attention backend to auto or sdpa.", title=title, name=name)
    return "sdpa"


def check_ring(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """ConfigurationError, with the names of those that can, for a kernel that cannot attend to a part of the keys."""
    if (refusal := _ring_refusal(name, device, dtype, head_dim)) is None:
        return
    able = ", ".join(other for other in KERNELS if _ring_refusal(other, device, dtype, head_dim) is None)
    what = "Attention backend {name} cannot run in a ring on {where} ({refusal})."
    fix = "Set ring to 1, or the attention backend to one of {able}."
    where = _where(device, dtype, head_dim)
    raise ConfigurationError(what, fix, name=repr(name), where=where, refusal=refusal, able=able)


def _where(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return f"{device.type} in {str(dtype).removeprefix('torch.')} with head size {head_dim}"


def _ring_refusal(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    attend_with_lse = KERNELS[name].attend_with_lse
    if attend_with_lse is None:
        return "it does not tell the log-sum-exp of its logits"
    if is_missing(name):
        return "it is not installed"
    return _refusal(attend_with_lse, device, dtype, head_dim)


def _refusal(attend: Attend | AttendWithLse, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernel cannot run, in its own words, or None where it ran."""
    query, key, value = torch.zeros(3, 1, _PROBE_TOKENS, 2, head_dim, device=device, dtype=dtype).unbind(0)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns once per kernel it passes over; the error says enough
            attend(query, key, value, None, None)
    # What kernels raise: PyTorch's RuntimeError or NotImplementedError, a package's own refusals and broken imports.
    except (RuntimeError, AssertionError, ValueError, TypeError, ImportError) as error:
        return first_line(error).rstrip(". ")
    return None


@cache
def _fastest(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the fastest of the candidates; cached, as one process need not measure twice."""
    state = os.environ.get("PARALLEL_DIT_STATE")  # the pool's folder, between processes
    folder = Path(state) / "measured" if state else None
    gpu = torch.cuda.get_device_properties(device)
    which = f"{gpu.name} {getattr(gpu, 'uuid', '')}"  # ranks on several GPUs keep theirs apart
    kind = f"attention | {which} | {measured.software()} | {dtype}, head size {head_dim}"
    # Only kernels that run in a ring, too; and one that is not installed is asked nothing.
    runs = (device, dtype, head_dim)
    in_ring = [name for name in _CANDIDATES if _ring_refusal(name, *runs) is None]
    able = [name for name in in_ring if _refusal(KERNELS[name].attend, *runs) is None]
    known = measured.recall(folder, kind)
    if not isinstance(known, dict) or set(known) != set(able):  # a package came or went
        known = {name: _milliseconds(KERNELS[name].attend, *runs) for name in able}
        log.info("Attention on %s, ms: %s", kind, known)
        if float("inf") not in known.values():
            measured.keep(folder, kind, known)
    return choose(known)


def choose(milliseconds: dict[str, float]) -> str:
    """Return the fastest kernel, the earlier of nearly equal ones, and `sdpa` where none ran."""
    chosen = "sdpa"
    for name in (name for name in _CANDIDATES if name in milliseconds):
        if chosen not in milliseconds or milliseconds[name] * _TIE < milliseconds[chosen]:
            chosen = name
    return chosen


def _milliseconds(attend: Attend, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Return the time of one call, infinite where the memory does not suffice."""
    batch, tokens, heads = _MEASURED_SHAPE
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    try:
        query, key, value = torch.randn(3, batch, tokens, heads, head_dim, device=device, dtype=dtype).unbind(0)
        with torch.no_grad():
            for call in range(_WARM_CALLS + _TIMED_CALLS):
                if call == _WARM_CALLS:
                    start.record()
                attend(query, key, value, None, None)
            stop.record()
    except torch.cuda.OutOfMemoryError:
        return float("inf")
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) / _TIMED_CALLS
