"""A GPU that is none: tensors on the CPU that say they are on another device, and recordings that hold what CUDA's do.

PyTorch's name for the device is "meta", which it needs no driver for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")
REFUSED = "operation not permitted when stream is capturing"
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
_MOVES = {"_to_copy", "copy_"}


class OnGpu(torch.Tensor):
    """A tensor of that GPU, around one of the CPU."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), storage_offset=inside.storage_offset(), dtype=inside.dtype,
            device=GPU,
        )  # fmt: skip
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never: `PretendedGpu` stands before it."""
        raise AssertionError(f"{func} outside of a PretendedGpu")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class PretendedGpu(TorchDispatchMode):
    """Inside, tensors can be on `GPU`. Counts what crosses the border, and refuses it while it records."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed: Counter[str] = Counter()
        self.replayed = 0
        self._tape: list[tuple[Any, Any, Any, Any]] | None = None

    def __enter__(self) -> PretendedGpu:
        self._numbers = _FromNumbers(self)
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._numbers.__exit__(*raised)

    def record(self, call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
        """`Record` of a RecordedForward: each operation is kept with the very tensors that it had."""
        self._tape = tape = []
        try:
            output = call(static)
        finally:
            self._tape = None

        def replay(tensors: list[torch.Tensor]) -> Any:
            self.replayed += 1
            for old, new in zip(static, tensors, strict=True):
                old.copy_(new)
            with torch.utils._python_dispatch._disable_current_modes():
                for func, args, kwargs, made in tape:
                    again = func(*args, **kwargs)
                    for old, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(again), strict=True):
                        if isinstance(old, torch.Tensor) and old is not new:
                            old.copy_(new)
            return pytree.tree_map_only(torch.Tensor, torch.clone, output)

        return replay

    def cross(self, what: str) -> None:
        """Something crosses the border.

        Raises:
            RuntimeError: while it records.
        """
        if self._tape is not None:
            raise RuntimeError(f"{REFUSED}: {what}")
        self.crossed[what] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it on the CPU."""
        kwargs = dict(kwargs or {})
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        here = [isinstance(each, OnGpu) for each in given]
        name = func._schema.name.partition("::")[2]
        asked = kwargs.get("device")
        there = any(here) if asked is None else torch.device(asked).type == GPU.type
        self._see(name, given, here, there)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        inside_args, inside_kwargs = pytree.tree_map_only(OnGpu, lambda each: each.inside, (args, kwargs))
        made = func(*inside_args, **inside_kwargs)
        if not there or name in _READS - {"nonzero", "masked_select", "_unique2", "unique_dim"}:
            return made
        if self._tape is not None:
            inputs = {id(each.untyped_storage()._cdata): each for each in pytree.tree_leaves(inside_args) if _is(each)}
            storages = {each.untyped_storage().data_ptr() for each in inputs.values()}
            leaves = [each for each in pytree.tree_leaves(made) if _is(each)]
            views = leaves and all(each.untyped_storage().data_ptr() in storages and each.numel() for each in leaves)
            if func._schema.is_mutable or not views:
                self._tape.append((func, inside_args, inside_kwargs, made))
        if func._schema.is_mutable and isinstance(args[0], OnGpu) and made is inside_args[0]:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, OnGpu, made)

    def _see(self, name: str, given: list[torch.Tensor], here: list[bool], there: bool) -> None:
        if name in _READS and any(here):
            self.cross(f"{name} on the host")
        elif name in _MOVES:
            source = here[1] if name == "copy_" else here[0]
            target = here[0] if name == "copy_" else there
            if source != target:
                self.cross(f"{name} to the {'GPU' if target else 'host'}")
        elif any(here):
            others = [each for each, is_here in zip(given, here, strict=True) if not is_here and each.ndim]
            if others and name not in {"index", "index_put_", "index_put"}:
                raise RuntimeError(f"{name} of tensors on two devices")
            # A number that one mask's places are filled with; any other of the host is copied.
            number = name == "index_put_" and not here[-1] and [each for each in given[1:-1] if each is not None]
            if number and len(number) == 1 and here[-2] and number[0].dtype is torch.bool:
                return
            if number:
                self.cross("a number to the GPU")
            masks = name.startswith("index") and [each for each in given[1:] if each.dtype in (torch.bool, torch.uint8)]
            if others or (masks and any(each.ndim and isinstance(each, OnGpu) for each in masks)):
                self.cross(f"{name} by the host's numbers, or a mask")


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _FromNumbers(TorchFunctionMode):
    """`torch.tensor` and its like, which PyTorch takes a shorter way for where the device is "meta"."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As `func`, whatever it is."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.tolist and isinstance(args[0], OnGpu):
            self._gpu.cross("tolist on the host")
            return args[0].inside.tolist()
        if func is torch.Tensor.__setitem__ and isinstance(args[0], OnGpu) and type(args[2]) in (bool, int, float):
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))  # on the host, as PyTorch has it for CUDA
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            target = kwargs.get("device", args[0].device if func is torch.Tensor.new_tensor else None)
            if target is not None and torch.device(target).type == GPU.type:
                return func(*args, **{**kwargs, "device": "cpu"}).to(GPU)
        return func(*args, **kwargs)


def to_gpu(value: Any) -> Any:
    """A tree of tensors, copied there."""
    return pytree.tree_map_only(torch.Tensor, lambda each: OnGpu(each.clone()), value)


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """Its values."""
    assert isinstance(tensor, OnGpu)
    return tensor.inside


def module_to_gpu(module: torch.nn.Module) -> None:
    """Parameters and buffers there."""
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, value in held.items():
                if value is not None:
                    held[name] = OnGpu(value.detach())  # type: ignore[index,assignment]
