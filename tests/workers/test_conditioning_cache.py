"""A context crosses the socket once a run; anything that changed crosses again."""

from __future__ import annotations

import msgspec
import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.conditioning import Conditioning, ConditioningStore, Shared
from parallel_runtime.requests.requests import ConditioningRef
from workers.client.held import Conditionings


def conditioning(seed: int = 0, **extra):
    generator = torch.Generator().manual_seed(seed)
    return {"context": torch.randn(1, 4, 8, generator=generator), "y": torch.randn(1, 3, generator=generator), **extra}


def test_equal_contents_in_new_tensors_are_sent_once():
    cache = Conditionings()
    first, tensors = cache.refer(conditioning(ref_latents=[torch.ones(1, 2)], method="offset", missing=None))
    again, nothing = cache.refer(conditioning(ref_latents=[torch.ones(1, 2)], method="offset"))
    assert first.new
    assert set(tensors) == {"c1.0", "c1.1", "c1.2"}
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
    cache = Conditionings()
    cache.refer(conditioning(ref_latents=[torch.ones(1, 2)], method="offset"))
    reference, tensors = cache.refer({**conditioning(ref_latents=[torch.ones(1, 2)], method="offset"), **change})
    assert reference.new
    assert tensors


def test_a_tensor_that_its_owner_wrote_into_is_sent_again():
    cache = Conditionings()
    mine = conditioning()
    cache.refer(mine)
    mine["context"] += 1
    assert cache.refer(mine)[0].new


def test_the_ranks_store_never_outgrows_the_cache_whatever_the_client_forgets():
    cache, store = Conditionings(), ConditioningStore()
    for seed in range(60):
        reference, tensors = cache.refer(conditioning(seed % 25))
        (taken,) = store.take([reference], tensors, tuple(cache))
        assert torch.equal(taken.arguments["context"], conditioning(seed % 25)["context"])
        assert store._kept.keys() == {*cache, reference.id}
        if seed % 7 == 0:
            cache.clear()


def test_a_request_of_more_branches_than_are_kept_has_all_of_them():
    cache, store = Conditionings(), ConditioningStore()
    for seeds in ([0], [*range(1, 12), 0]):  # the last was known when the request began
        referred = [cache.refer(conditioning(seed)) for seed in seeds]
        tensors = {name: each for _, named in referred for name, each in named.items()}
        taken = store.take([reference for reference, _ in referred], tensors, tuple(cache))
        expected = [conditioning(seed)["context"] for seed in seeds]
        assert all(torch.equal(each.arguments["context"], text) for each, text in zip(taken, expected, strict=True))


def test_an_argument_that_cannot_travel_is_refused_by_name():
    with pytest.raises(RequestError, match="'patches' is or holds a function"):
        Conditionings().refer(conditioning(patches={"a": [lambda: None]}))


def test_tensors_deep_inside_of_an_argument_travel():
    cache, store = Conditionings(), ConditioningStore()
    control = {"input": [torch.ones(2, 3), None], "scale": 0.5, "sizes": (1, [2, torch.zeros(1)])}
    given = conditioning(control=Shared(control))
    reference, tensors = cache.refer(given)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(reference), type=ConditioningRef)
    (taken,) = store.take([sent], tensors)
    assert taken.shared == {"control"}
    got = taken.arguments["control"]
    assert (got["scale"], got["input"][1], got["sizes"][0]) == (0.5, None, 1)
    assert torch.equal(got["input"][0], torch.ones(2, 3))
    assert torch.equal(got["sizes"][1][1], torch.zeros(1))
    assert cache.refer(conditioning(control=Shared(control)))[0].id == reference.id
    other = {**control, "sizes": (1, [2, torch.ones(1)])}
    assert cache.refer(conditioning(control=Shared(other)))[0].id != reference.id
    assert cache.refer(conditioning(control=control))[0].id != reference.id


def test_rows_of_a_batch_leave_what_is_shared_alone():
    options = {"cond_or_uncond": [0, 1], "rope_options": {"scale_x": 2.0}}
    arguments = {"context": torch.arange(4)[:, None], "mask": torch.zeros(4, 1), "transformer_options": options}
    rows = Conditioning({**arguments, "deep": {"a": [torch.arange(4)]}}, frozenset({"mask"})).rows(1, 2, 4)
    assert rows.arguments["context"].tolist() == [[1]]
    assert rows.arguments["mask"].shape == (4, 1)
    assert rows.arguments["deep"]["a"][0].tolist() == [1]
    assert rows.arguments["transformer_options"] == {**options, "cond_or_uncond": [0]}
    both = Conditioning(arguments).rows(1, 3, 4)
    assert both.arguments["transformer_options"]["cond_or_uncond"] == [0, 1]


@pytest.mark.parametrize("name", ["context", "y", "odd", "flag", "none"])
def test_a_change_of_the_last_element_of_any_tensor_is_found(name):
    def tensors() -> dict[str, torch.Tensor]:
        odd = torch.arange(9.0).bfloat16()[1:6]  # neither its bytes nor its place is a multiple of four
        return {**conditioning(), "odd": odd, "flag": torch.tensor(True), "none": torch.tensor([1.0, torch.nan])}

    cache = Conditionings()
    first, _ = cache.refer(tensors())
    assert cache.refer(tensors())[0].id == first.id
    changed = tensors()
    changed[name].view(-1)[-1] = 0
    assert cache.refer(changed)[0].new


def test_a_conditioning_is_compared_wherever_it_lies_in_its_memory():
    # At [1:5] it begins four bytes behind a multiple of eight.
    cache = Conditionings()
    row = torch.arange(6.0)
    first, _ = cache.refer({"context": row[:4].clone()})
    again, _ = cache.refer({"context": torch.cat([torch.zeros(1), row])[1:5]})
    assert again.id == first.id
