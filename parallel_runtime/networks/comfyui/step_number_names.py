"""Modules of ComfyUI whose `float(tensor)` is a number of the step: while a forward is recorded it stays on the GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from ...acceleration.host_watch import number_or_float


def leave_numbers_on_the_gpu(modules: Iterable[str]) -> None:
    """Give `float` in these modules another meaning while their network is recorded (acceleration/step_numbers.py).

    Nothing undoes it: else, it is what it was.
    """
    for each in modules:
        vars(importlib.import_module(each))["float"] = number_or_float
