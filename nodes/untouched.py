"""What other nodes have changed inside of a transformer whose forward runs elsewhere, with the file's weights: a
replaced method, hook, submodule or weight would have no effect there, without an error. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parallel_runtime.errors import RequestError
from parallel_runtime.said import said

_NAMED = 3  # changes that a message spells out


class Untouched:
    """A transformer with all that its builder does to it; a change is what comes later."""

    def __init__(self, transformer: nn.Module):
        named = transformer.named_modules(prefix="diffusion_model")
        self._modules = {path: _Module(path, module) for path, module in named}
        self._transformer, self._class = transformer, type(transformer)
        self._methods = _callables_of(self._class)
        # How many there are is what a call can afford to look at: some ten nanoseconds each.
        self._attributes = [vars(each.module) for each in self._modules.values()]
        hooks = [hooks for each in self._modules.values() for hooks in _hooks_of(each.module)]
        self._hooked, self._unhooked = [each for each in hooks if each], [each for each in hooks if not each]
        self._counted = self._count()

    def check(self) -> None:
        """Look at everything, in a few milliseconds; RequestError with what was changed."""
        if found := list(self._changes()):
            more = said(" and {count} more", count=len(found) - _NAMED) if len(found) > _NAMED else ""
            text = "The workers cannot carry changes inside of the transformer: {found}{more}."
            fix = (
                "Remove the node that makes them and run *Free model and node cache*, as they stay in the MODEL; or "
                "load the model with Load Diffusion Model."
            )
            raise RequestError(text, fix, found=", ".join(found[:_NAMED]), more=more)
        self._counted = self._count()  # what else came is no concern of the pool's

    def check_quickly(self) -> None:
        """As `check`, at every call: a third of a millisecond for methods and hooks that came since the last look."""
        if self._count() != self._counted:
            self.check()

    def expect(self, path: str, name: str, tensor: torch.Tensor) -> None:
        """Take this tensor of a module for its own from now on."""
        self._modules[path].tensors[name] = tensor, _state(tensor)

    def _count(self) -> tuple[Any, ...]:
        attributes, hooks = sum(map(len, self._attributes)), sum(map(len, self._hooked))
        return _callables_of(self._transformer), attributes, any(self._unhooked), hooks

    def _changes(self) -> Iterator[str]:
        for name, method in _callables_of(self._class).items():
            if self._methods.get(name) is not method:
                yield f"a replaced {self._class.__name__}.{name}"
        for each in self._modules.values():
            yield from each.changes()


class _Module:
    """One module as it was."""

    def __init__(self, path: str, module: nn.Module):
        self.path, self.module = path, module
        self._parts = _parts_of(module)
        self._hooks = [set(hooks) for hooks in _hooks_of(module)]
        self.tensors = {name: (tensor, _state(tensor)) for name, tensor in _tensors_of(module).items()}

    def changes(self) -> Iterator[str]:
        parts = _parts_of(self.module)
        for name in sorted(self._parts.keys() | parts.keys()):
            if self._parts.get(name) is not parts.get(name):
                yield f"a replaced {self.path}.{name}"
        if any(set(now) - before for before, now in zip(self._hooks, _hooks_of(self.module), strict=True)):
            yield f"a hook on {self.path}"
        now = _tensors_of(self.module)
        for name in sorted(self.tensors.keys() | now.keys()):
            tensor, state = self.tensors.get(name, (None, None))
            if now.get(name) is not tensor or (tensor is not None and _state(tensor) != state):
                yield f"other numbers in {self.path}.{name}"


def _callables_of(owner: nn.Module | type) -> dict[str, Any]:
    """Functions that a class defines itself, or that were put into this one object."""
    return {name: value for name, value in vars(owner).items() if callable(value)}


def _parts_of(module: nn.Module) -> dict[str, Any]:
    """Submodules, and methods that were put over those of its class."""
    return {**_callables_of(module), **dict(module.named_children())}


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_pre_hooks, module._forward_hooks]


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Its own parameters and buffers."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _state(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Where it is, and how often it was written to, which tensors of ComfyUI's inference mode do not count."""
    return tensor.device, 0 if tensor.is_inference() else tensor._version
