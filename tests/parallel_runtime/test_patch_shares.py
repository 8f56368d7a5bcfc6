"""Ranks that patch weights by shares have the bits that each computes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel_runtime.patching.patch_shares import ALWAYS, PatchShares, worth_sharing
from parallel_runtime.requests.facts import CPU, NVLINK, PCIE
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.test_weight_store import CONFIG
from tests.ranks import run_ranks
from tests.tiny_flux import write_original

COMFYUI = find_comfyui()
LAYERS = 4
"""That tests/parallel_runtime/test_patching.py patches."""


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mapped"), [(2, False), (3, True)], ids=["2", "3, mapped"])
def test_each_rank_computes_a_share_and_has_every_bit(ranks, mapped, tmp_path):
    arguments = {"comfyui": str(COMFYUI), "path": str(write_original(tmp_path / "m.safetensors", CONFIG, seed=1))}
    found = run_ranks(ranks, "tests.parallel_runtime.patch_sharing:compare", arguments | {"mapped": mapped})
    for each in found:
        assert each["wrong"] == []
        assert each["shared"] == [True, False, False]
        alone, shared = each["computed"]["False"], each["computed"]["True"]
        assert alone == dict.fromkeys(alone, LAYERS) | {"away": 0}
        assert shared["lost"] == LAYERS  # the ranks had not the same: each computes its own
    for turn in ("added", "strength", "another", "again"):
        assert sum(each["computed"]["True"][turn] for each in found) == LAYERS
        assert max(each["computed"]["True"][turn] for each in found) < LAYERS


def test_ranks_share_where_links_are_faster_than_computing(monkeypatch):
    monkeypatch.delenv(ALWAYS, raising=False)
    gpu = replace(CPU, name="a GPU")
    assert worth_sharing(replace(gpu, link=NVLINK), 4)
    assert not worth_sharing(replace(gpu, link=NVLINK), 2)
    assert not worth_sharing(replace(gpu, link=PCIE), 8)
    assert not worth_sharing(replace(gpu, link=NVLINK, network=PCIE), 4)
    assert not worth_sharing(CPU, 4)
    monkeypatch.setenv(ALWAYS, "1")
    assert worth_sharing(CPU, 2)
    assert not worth_sharing(CPU, 1)
    monkeypatch.setenv("PARALLEL_DIT_OFF", "shares")
    assert not worth_sharing(replace(gpu, link=NVLINK), 4)


def test_every_rank_gets_about_as_much_to_compute():
    sizes = {f"{number}": 100 - number for number in range(40)}
    owners = PatchShares(0, 3).owners(sizes)
    work = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(3)]
    assert max(work) - min(work) < 100
    assert owners == PatchShares(2, 3).owners(dict(reversed(sizes.items())))
