"""Numbers of the step that a forward takes to the host only to order them and send them back: they stay on the GPU.

MiniMax H3 makes its table of timesteps so. Such a number is another one in every step, so a recording that compares
what was read would never be a result; what is asked of it, whether it is less than another, seldom changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class StepNumber:
    """A number in place of `float(tensor)`. Comparing it reads whether that holds; all else reads the number itself.

    In a set or dict it is no other number than itself: two that are equal in one step alone make no other table of
    that step than of the next.

    Args:
        tensor: of one number on the GPU.
        name: how many came before it in the forward, so that sets have the same order in all calls of a kind.
    """

    def __init__(self, tensor: torch.Tensor, name: int):
        self.there = tensor.detach().reshape(()).double()
        self._name = name

    def __hash__(self) -> int:
        return self._name

    def __eq__(self, other: object) -> Any:
        return self is other or _compared(operator.eq, self, other)

    def __lt__(self, other: Any) -> Any:
        return _compared(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return _compared(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compared(operator.ge, self, other)

    def __float__(self) -> float:
        return float(self.there)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `func` with the number itself, which is read."""
        args, kwargs = pytree.tree_map_only(cls, float, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _compared(how: Callable[[Any, Any], Any], one: StepNumber, other: Any) -> Any:
    if not isinstance(other, StepNumber | int | float):
        return NotImplemented
    return bool(how(one.there, other.there if isinstance(other, StepNumber) else other))


def _of_floats(name: str) -> Callable[..., Any]:
    def computed(number: StepNumber, *others: Any) -> Any:
        return getattr(float(number), name)(*(float(each) if isinstance(each, StepNumber) else each for each in others))

    return computed


_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in ("bool", "int", "neg", "abs", "round", "trunc", "format", "str", *_TWO, *(f"r{each}" for each in _TWO)):
    setattr(StepNumber, f"__{_name}__", _of_floats(f"__{_name}__"))


def has_step_numbers(values: Any) -> bool:
    """Whether it is a list with such numbers in it."""
    return isinstance(values, list | tuple) and any(isinstance(each, StepNumber) for each in values)


def on_gpu(values: Sequence[Any], others: torch.Tensor) -> torch.Tensor:
    """Numbers as one tensor (N,) of the type of `others` (N,), which has those that the host knows in their places."""
    pairs = zip(values, others, strict=True)
    return torch.stack([each.there.to(known.dtype) if isinstance(each, StepNumber) else known for each, known in pairs])
