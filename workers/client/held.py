"""What the ranks hold beside models, as far as this side can know: conditionings, networks, weight patches, and calls
that are prepared. Each crosses the socket once: a text context once a run, a LoRA once whatever its strength."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from parallel_runtime.networks.comfyui.module_tree import describe_module
from parallel_runtime.patching.patch_data import PatchSet, WeightPatches, as_bytes
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.patches import Attached
from parallel_runtime.requests.requests import Attach, ConditioningRef, KeepPatches, attached_name

from ..wire.frames import MAX_TENSORS
from .node_requests import Submission, Submit

MOST_SETS = 32
MOST_BYTES = 4 << 30  # of factors that the ranks keep, each of them on its host, beside those of the call at hand
PATCH_PIECE, NETWORK_PIECE = 64 << 20, 256 << 20  # bytes of tensors in one request
_MOST_FACTORS = 1024
_MOST_CONDITIONINGS = 8
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)

Name = TypeVar("Name")
Known = TypeVar("Known")


class Mirror(OrderedDict[Name, Known]):
    """Names of things that the ranks hold, the one that was used longest ago first -> what this side knows of each. A
    request that brings another one names all that stay: what is not certain after a failure counts as not held."""

    def find(self, fits: Callable[[Known], bool]) -> Name | None:
        """The name of the last used one that fits, which is used now; None where none does."""
        for name, known in reversed(self.items()):
            if fits(known):
                self.move_to_end(name)
                return name
        return None

    def hold(self, name: Name, known: Known, most: int) -> None:
        """The ranks hold it from now on; where there are more than `most`, the one that was used longest ago goes."""
        self[name] = known
        if len(self) > most:
            self.popitem(last=False)


class Conditionings(Mirror[int, tuple[str, list[torch.Tensor]]]):
    """Compares contents, not identities: ComfyUI concatenates anew for every step. Known of each is its form, which can
    be compared without looking into its tensors, and copies of these."""

    def __init__(self) -> None:
        super().__init__()
        self._next = itertools.count(1)

    def refer(self, conditioning: Mapping[str, Any], index: int = 0) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
        """Return (reference, tensors to send along); RequestError for what does not travel."""
        arguments = {name: value for name, value in conditioning.items() if value is not None}
        reference, named = refer(next(self._next), arguments, index)
        tensors = list(named.values())
        form = repr((reference.trees, reference.shared, [(each.dtype, each.shape, each.device) for each in tensors]))
        number = self.find(lambda kept: kept[0] == form and all(map(same_bytes, kept[1], tensors)))
        if number is not None:
            return ConditioningRef(number, index=index), {}
        # Copies: the caller may write into its tensors later, and a comparison with itself would not notice.
        self.hold(reference.id, (form, [tensor.clone() for tensor in tensors]), _MOST_CONDITIONINGS)
        return reference, named


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one form hold the same, bit for bit: as the widest integers that fit both, which are seven
    times faster to compare than bfloat16, and NaN is NaN."""
    first, second = one.reshape(-1), other.reshape(-1)
    places = first.nbytes | first.data_ptr() | second.data_ptr()  # a multiple of a power of two where each of them is
    width = next(dtype for dtype in _WIDTHS if places % dtype.itemsize == 0)
    return torch.equal(first.view(width), second.view(width))


class Attachments:
    """Keeps the ranks' networks those that somebody here has."""

    def __init__(self, submit: Submit):
        self._submit = submit
        self._held: Mirror[int, Callable[[], torch.nn.Module | None]] = Mirror()

    def bring(self, networks: Iterable[Attached]) -> None:
        """Have the ranks know these, and forget those that nobody here has any more."""
        there = Mirror((number, module) for number, module in self._held.items() if module() is not None)
        if len(there) < len(self._held):
            self._submit(Submission(request=Attach(kept=tuple(there))))
            self._held = there
        for each in networks:
            if each.number not in self._held:
                self._held[each.number] = weakref.ref(each.module)
                self._send(each)

    def forget(self) -> None:
        """Trust none of them any more: the next call has the ranks forget them."""
        self._held = Mirror((number, lambda: None) for number in self._held)

    def _send(self, network: Attached) -> None:
        tensors: list[torch.Tensor] = []
        form = describe_module(network.module, tensors)
        named = {attached_name(place): tensor for place, tensor in enumerate(tensors)}
        for piece in _in_pieces(named, NETWORK_PIECE, MAX_TENSORS):
            self._submit(Submission(request=Attach(network.number), tensors=piece))
        self._submit(Submission(request=Attach(network.number, form)))


def _in_pieces(tensors: Mapping[str, torch.Tensor], most_bytes: int, most: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in their order, so many and so many bytes at a time, or one where that has more. Memory that is
    shared with the ranks then need be no larger for them."""
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if piece and (size + tensor.nbytes > most_bytes or len(piece) == most):
            yield piece
            piece, size = {}, 0
        piece[name] = tensor
        size += tensor.nbytes
    if piece:
        yield piece


class Patches:
    """Sets of weight patches, each with its factors by their bytes; several sets may have factors in common."""

    def __init__(self, submit: Submit):
        self._submit = submit
        self._sets: Mirror[str, dict[str, int]] = Mirror()

    def bring(self, patches: WeightPatches) -> None:
        """Have patches in the pool; ParallelError where it has no ComfyUI to compute them, or died."""
        if new := [each for each in patches.sets if each.name not in self._sets]:
            self._make_room([each.name for each in patches.sets])
            assert patches.comfyui is not None
            self._send(patches.comfyui, new)  # where that fails, ranks have more than counts
        for each in patches.sets:
            self._sets[each.name] = {name: factor.nbytes for name, factor in each.factors.items()}
            self._sets.move_to_end(each.name)

    def forget(self) -> None:
        """Trust none of them any more; the pool drops with the next request what it may still hold."""
        self._sets.clear()

    def _send(self, comfyui: ComfyuiCode, new: Sequence[PatchSet]) -> None:
        """Have the pool keep new sets beside those that it has. The first request says which stay."""
        known = {name for factors in self._sets.values() for name in factors}
        factors = {
            name: as_bytes(factor.cpu()) for each in new for name, factor in each.factors.items() if name not in known
        }
        sets = {each.name: each.to_bytes() for each in new}
        kept: tuple[str, ...] | None = tuple(self._sets)
        for piece in _in_pieces(factors, PATCH_PIECE, _MOST_FACTORS):
            self._submit(Submission(request=KeepPatches(comfyui, tuple(piece), kept=kept), tensors=piece))
            kept = None
        self._submit(Submission(request=KeepPatches(comfyui, sets=tuple(sets), kept=kept), tensors=sets))

    def _make_room(self, needed: Sequence[str]) -> None:
        """Count no longer on the sets that were used longest ago."""
        for name in [name for name in self._sets if name not in needed]:
            sizes = {factor: size for factors in self._sets.values() for factor, size in factors.items()}
            if len(self._sets) < MOST_SETS and sum(sizes.values()) <= MOST_BYTES:
                return
            del self._sets[name]
