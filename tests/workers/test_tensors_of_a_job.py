"""Where a rank takes a job's tensors: to its device, but for what it only keeps, which has no business there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.engine.prepared_load import prepare_patches
from parallel_runtime.engine.rank_state import Prepared
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.requests import Finished, KeepPatches
from workers.rank.rank import Rank
from workers.wire.protocol import Done, Job
from workers.wire.tensors import Segment, write

FACTOR = torch.arange(12, dtype=torch.uint8)
KEEP = KeepPatches(ComfyuiCode("", {}), factors=("factor",))


@pytest.fixture
def rank():
    """One whose device has no numbers: what was there, nobody can read again."""
    segment, sent = Segment.create(0), []
    rank = object.__new__(Rank)
    rank.rank, rank.device = 0, torch.device("meta")
    rank.client_memory = SimpleNamespace(of=lambda job: segment, for_all=True)
    rank.connection = SimpleNamespace(send=lambda message, buffers=(): sent.append(message))
    rank.heartbeat = SimpleNamespace(got_on=lambda: None)
    job = Job(1, KEEP, tensors=write(segment.request, {"factor": FACTOR}), segment=segment.path)
    yield rank, job, sent
    segment.close()


def test_weight_patches_never_are_on_the_device(rank, monkeypatch):
    monkeypatch.setattr("parallel_runtime.engine.prepared_load.use_comfyui", lambda folder, options: None)
    rank, job, sent = rank
    kept = {}
    state = SimpleNamespace(
        device=rank.device, patches=SimpleNamespace(keep=lambda request, tensors: kept.update(tensors))
    )
    rank._run(None, job, prepare_patches(state, KEEP), {})
    assert isinstance(sent[0], Done), sent
    assert torch.equal(kept["factor"], FACTOR)


def test_what_runs_has_its_tensors_on_the_device(rank):
    rank, job, sent = rank
    seen = {}
    prepared = Prepared(run_it=lambda tensors, control, agreed: (seen.update(tensors), (Finished(), {}))[1])
    rank._run(None, job, prepared, {})
    assert isinstance(sent[0], Done), sent
    assert seen["factor"].device.type == "meta"
