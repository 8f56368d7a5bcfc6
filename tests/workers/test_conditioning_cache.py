"""A context crosses the socket once a run; anything that changed crosses again."""

from __future__ import annotations

import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.pipeline.conditioning import ConditioningStore
from workers.conditioning_cache import ConditioningCache


def conditioning(seed: int = 0, **extra):
    generator = torch.Generator().manual_seed(seed)
    return {"context": torch.randn(1, 4, 8, generator=generator), "y": torch.randn(1, 3, generator=generator), **extra}


def test_equal_contents_in_new_tensors_are_sent_once():
    cache = ConditioningCache()
    first, tensors, _ = cache.refer(conditioning(ref_latents=[torch.ones(1, 2)], method="offset", missing=None))
    again, nothing, _ = cache.refer(conditioning(ref_latents=[torch.ones(1, 2)], method="offset"))
    assert first.new
    assert set(tensors) == {"c1.context", "c1.y", "c1.ref_latents.0"}
    assert (again.id, again.new, nothing) == (first.id, False, {})


@pytest.mark.parametrize(
    "change",
    [
        {"y": torch.zeros(1, 3)},
        {"context": conditioning()["context"].to(torch.bfloat16)},
        {"guidance": torch.tensor([3.5])},
        {"method": "index"},
        {"ref_latents": [torch.ones(1, 2), torch.ones(1, 2)]},
    ],
)
def test_any_change_is_sent_again(change):
    cache = ConditioningCache()
    cache.refer(conditioning(ref_latents=[torch.ones(1, 2)], method="offset"))
    reference, tensors, _ = cache.refer({**conditioning(ref_latents=[torch.ones(1, 2)], method="offset"), **change})
    assert reference.new
    assert tensors


def test_a_tensor_that_its_owner_wrote_into_is_sent_again():
    cache = ConditioningCache()
    mine = conditioning()
    cache.refer(mine)
    mine["context"] += 1
    assert cache.refer(mine)[0].new


def test_the_ranks_store_never_outgrows_the_cache_whatever_the_client_forgets():
    cache, store = ConditioningCache(), ConditioningStore()
    for seed in range(60):
        reference, tensors, dropped = cache.refer(conditioning(seed % 25))
        store.drop(dropped)
        assert torch.equal(store.take(reference, tensors).context, conditioning(seed % 25)["context"])
        if seed % 7 == 0:
            cache.clear()
        assert len(store._kept) <= 17


def test_an_argument_that_cannot_travel_is_refused_by_name():
    with pytest.raises(RequestError, match="'patches' is a dict"):
        ConditioningCache().refer(conditioning(patches={"a": 1}))
