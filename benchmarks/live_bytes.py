"""Bytes of the tensors that live at once, on any device, without what kernels take inside of an operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, `peak` is the most bytes that lived after any operation.

    Args:
        besides: tensors that do not count, such as weights.
    """

    def __init__(self, besides: Iterable[torch.Tensor]):
        super().__init__()
        self.peak = 0
        self._besides = [StorageWeakRef(tensor.untyped_storage()) for tensor in besides]
        self._known = {each.cdata for each in self._besides}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._known:
                    self._live[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return output
