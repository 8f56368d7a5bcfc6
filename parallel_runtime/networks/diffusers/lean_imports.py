"""The package diffusers, an extra of the install for what runs without ComfyUI, kept from importing what no
transformer's forward needs. Who needs it has it from here, so that this file is the first to import it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from packaging.version import Version
from torch import nn

from ...errors import UnsupportedModelError
from ...measured import find_version

OLDEST = "0.42"  # oldest version that the families are written for
_COMPILER = "torch._dynamo"
_MARK = "diffusers_allows_in_graph"
_UNUSED = ("transformers", "scipy", "accelerate", "peft", "torchvision")


def _mark(kind: Any) -> Any:
    setattr(kind, _MARK, True)
    return kind


def _leave_as_it_is(function: Any = None, *args: Any, **options: Any) -> Any:
    return _leave_as_it_is if function is None else function


@contextlib.contextmanager
def _instead_of(name: str, module: ModuleType | None) -> Iterator[None]:
    """Inside, who imports a package that is not imported yet gets this module, or with None an ImportError."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _without_compiler() -> contextlib.AbstractContextManager[None]:
    """Inside, diffusers finds of PyTorch's compiler the two decorators that it takes from there."""
    stand_in: Any = ModuleType(_COMPILER)
    stand_in.allow_in_graph, stand_in.disable = _mark, _leave_as_it_is
    return _instead_of(_COMPILER, stand_in)


def import_diffusers() -> ModuleType:
    """The package diffusers; UnsupportedModelError where it is not installed, or does not import."""
    fix = 'In the folder of Parallel DiT run Python with: -m pip install ".[diffusers]"'
    found = find_version("diffusers")  # other packs may have brought an older one
    if found is None or find_spec("diffusers") is None or Version(found) < Version(OLDEST):
        what = "A diffusers folder needs the Python package diffusers ({oldest} or newer), which is not installed."
        raise UnsupportedModelError(what, fix, oldest=OLDEST)
    try:
        with _without_compiler():
            import diffusers
            import diffusers.utils
    except (ImportError, RuntimeError) as error:  # RuntimeError: how diffusers tells of one of its parts
        what = "The Python package diffusers does not import here ({problem})."
        raise UnsupportedModelError(what, fix, problem=error) from error
    return diffusers


def leave_out_unused_packages() -> None:
    """Let diffusers find only what a transformer's forward needs, in this whole process; see `import_diffusers`.
    A transformer's module otherwise imports most of transformers, SciPy and more, and PyTorch's compiler for its
    decorators: half of what a rank would import, 3 s on a slow core. Classes that are imported already stay."""
    utilities = import_diffusers().utils
    availability = utilities.import_utils
    for package in _UNUSED:
        if hasattr(availability, flag := f"_{package}_available"):
            setattr(availability, flag, False)
    # Of LoRA layers of diffusers' own there are none; each forward would look for them, and the first import peft.
    utilities.USE_PEFT_BACKEND = False
    with _without_compiler(), _instead_of("transformers", None):
        import diffusers.hooks
        import diffusers.quantizers  # noqa: F401 - asks for transformers whatever is said to be available


def untraced_classes(module: nn.Module) -> set[type]:
    """Of a model's classes, those that the compiler is not to trace: what diffusers would have told it by itself."""
    return {type(each) for each in module.modules() if getattr(type(each), _MARK, False)}
