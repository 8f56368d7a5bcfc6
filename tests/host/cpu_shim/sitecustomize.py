"""Lets ComfyUI start beside a CPU build of torch, for which torchvision and torchaudio are CUDA wheels that fail.

Put this folder on PYTHONPATH. torchvision's Python code registers fake kernels for operators that its compiled part
should have declared: they are declared here, without kernels, just before it is imported. torchaudio is replaced by
an empty module whose contents fail when they are called. Nothing happens until one of the two is imported, and nothing
at all beside a torch that was built for GPUs.
"""

import importlib.abc
import importlib.machinery
import sys
import types

_BOX_ARGUMENTS = "Tensor dets, Tensor scores, float iou_threshold"
_POOL_ARGUMENTS = (
    "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned"
)
_SCHEMAS = (
    f"nms({_BOX_ARGUMENTS}) -> Tensor",
    f"qnms({_BOX_ARGUMENTS}) -> Tensor",
    f"roi_align({_POOL_ARGUMENTS}) -> Tensor",
    "_cuda_version() -> int",
)


class _EmptyModule(types.ModuleType):
    """Any attribute is a function that says that it is not there."""

    __path__: list[str] = []  # noqa: RUF012 - what import machinery expects
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args, **kwargs):
            raise RuntimeError(f"{self.__name__}.{name} is not available beside a CPU build of torch")

        return absent


def _is_cpu_build():
    import torch

    return not (torch.version.cuda or torch.version.hip)


class _Finder(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators when it is first asked for; answers for torchaudio itself."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ("torchaudio", "torchvision") or not _is_cpu_build():
            return None
        if name.partition(".")[0] == "torchaudio":
            return importlib.machinery.ModuleSpec(name, _EmptyLoader(), is_package=True)
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                self.library.define(schema)
        return None


class _EmptyLoader(importlib.abc.Loader):
    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""


sys.meta_path.insert(0, _Finder())
