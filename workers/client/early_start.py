"""Processes of a pool that began before ComfyUI had imported torch, of which their supervisor needs nothing."""

from __future__ import annotations

import os

import msgspec

from parallel_runtime.requests.requests import ComfyuiCode

from ..launch import EXPECTED_COMFYUI, PoolSpec
from .supervisor_process import SupervisorProcess

RANKS = "workers.rank"
"""Module of the ranks."""

_early: dict[PoolSpec, SupervisorProcess] = {}


def start_early(spec: PoolSpec, comfyui: ComfyuiCode) -> None:
    """Start a pool's processes, for the pool that starts first; they end with this process. Its ranks, and those of
    later pools, import what they will want of ComfyUI's code."""
    os.environ[EXPECTED_COMFYUI] = msgspec.json.encode(comfyui).decode()
    _early[spec] = SupervisorProcess(spec, RANKS)


def take_early(spec: PoolSpec | None) -> SupervisorProcess | None:
    """Those of a pool that starts now, if it is that one. Others end: whoever started them was mistaken."""
    found = None if spec is None else _early.pop(spec, None)
    while _early:
        _early.popitem()[1].end_by_force()
    return found
