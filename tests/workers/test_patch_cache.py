"""What the client sends of weight patches: each tensor once, in pieces; what was dropped, and what failed, again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.patching.patch_data import Encoder, PatchSet, PatchStore, WeightPatches
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.requests import KeepPatches
from workers.client import held
from workers.client.held import Patches

CODE = ComfyuiCode("/comfyui")


class Pool:
    """Keeps what it is sent, as a rank does; fails at the requests of these numbers."""

    def __init__(self, fails: tuple[int, ...] = ()):
        self.store = PatchStore()
        self.sent: list[tuple[KeepPatches, dict[str, torch.Tensor]]] = []
        self._fails = fails

    def submit(self, submission: Any) -> Any:
        self.sent.append((submission.request, dict(submission.tensors)))
        if len(self.sent) in self._fails:
            raise RequestError("No.", "")
        self.store.keep(submission.request, submission.tensors)

    @property
    def factors(self) -> list[str]:
        return [name for request, _ in self.sent for name in request.factors]


def patches(strength: float, *tensors: torch.Tensor, encoder: Encoder | None = None) -> WeightPatches:
    each = {f"diffusion_model.{n}.weight": [(strength, ("diff", (t,)), 1.0, None, None)] for n, t in enumerate(tensors)}
    return WeightPatches((encoder or Encoder()).encode(each), comfyui=CODE)


def contents(pool: Pool, wanted: WeightPatches) -> PatchSet:
    return pool.store.find(wanted.names).patches


def test_tensors_cross_once_whatever_the_strength_and_copies_of_them_are_the_same():
    pool = Pool()
    cache, tensors = Patches(pool.submit), [torch.rand(4, 4), torch.rand(8).bfloat16()]
    first = patches(0.5, *tensors)
    cache.bring(first)
    cache.bring(first)
    again = patches(-1.0, *[tensor.clone() for tensor in tensors])
    cache.bring(again)
    assert len(pool.factors) == len(set(pool.factors)) == 2
    assert len(pool.sent) == 3  # tensors, a set, another set
    found = contents(pool, again)
    assert {name: patch[0][0] for name, patch in found.weights.items()} == {"0.weight": -1.0, "1.weight": -1.0}
    assert contents(pool, first).weights != found.weights
    assert sum(factor.numel() for factor in found.factors.values()) == sum(tensor.nbytes for tensor in tensors)


def test_a_tensor_that_was_written_to_is_another_one():
    encoder, tensor = Encoder(), torch.rand(4)
    before = patches(1.0, tensor, encoder=encoder)
    assert patches(1.0, tensor, encoder=encoder).names == before.names
    tensor += 1
    assert patches(1.0, tensor, encoder=encoder).names != before.names


def test_large_ones_go_in_pieces(monkeypatch):
    monkeypatch.setattr(held, "PATCH_PIECE", 100)
    pool = Pool()
    wanted = patches(1.0, *[torch.rand(10) for _ in range(5)], torch.rand(200))
    Patches(pool.submit).bring(wanted)
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for request, tensors in pool.sent if request.factors]
    assert sum(sizes) == 1000
    assert sorted(sizes)[:-1] == [40, 80, 80]
    assert contents(pool, wanted).factors.keys() == wanted.patches.factors.keys()


@pytest.mark.parametrize("limit", ["MOST_SETS", "MOST_BYTES"])
def test_those_that_were_used_longest_ago_are_dropped_with_their_tensors(limit, monkeypatch):
    monkeypatch.setattr(held, limit, {"MOST_SETS": 2, "MOST_BYTES": 60}[limit])
    pool = Pool()
    cache = Patches(pool.submit)
    one, two, three = (patches(1.0, torch.rand(10)) for _ in range(3))
    for wanted in (one, two, one, three, one, two):
        cache.bring(wanted)
        assert contents(pool, wanted).name == wanted.patches.name
    assert pool.factors.count(next(iter(two.patches.factors))) == 2


def test_after_a_failure_what_was_on_its_way_is_sent_again():
    pool = Pool(fails=(4,))
    cache, earlier, wanted = Patches(pool.submit), patches(1.0, torch.rand(4)), patches(1.0, torch.rand(4))
    cache.bring(earlier)
    with pytest.raises(RequestError):
        cache.bring(wanted)
    cache.bring(wanted)
    cache.bring(earlier)
    assert contents(pool, wanted).name == wanted.patches.name
    assert contents(pool, earlier).name == earlier.patches.name
    assert len(pool.factors) == 3


def test_what_the_client_is_not_certain_of_goes_with_the_next_request():
    pool = Pool()
    cache, many, one = Patches(pool.submit), patches(1.0, *torch.rand(3000, 2)), patches(1.0, torch.rand(4))
    cache.bring(many)
    cache.forget()
    cache.bring(one)
    assert contents(pool, one).name == one.patches.name
    assert pool.store._sets.keys() == {one.patches.name}
    assert pool.store._factors.keys() == one.patches.factors.keys()
