"""What a run took of a GPU comes with its answer, and the next of that size is predicted by it."""

from __future__ import annotations

import msgspec

from parallel_runtime import memory
from parallel_runtime.planning.cost_constants import CONTEXT_BYTES
from parallel_runtime.requests.plan_details import PlanDetails
from parallel_runtime.requests.requests import Finished, Forward
from tests.parallel_runtime.streamed_run import PoolRank, flux_tensors
from tests.tiny_flux import tiny_config, write_diffusers_folder
from workers.supervisor.jobs import ActiveJob
from workers.wire.frames import Frame, decode_header
from workers.wire.protocol import Done, Ready

PLAN = PlanDetails("FLUX.1", {}, 1, (57,), 24, 57, 4096, 1, memory_bytes=5)


def test_a_run_tells_its_peak_and_the_next_of_that_size_is_predicted_by_it(tmp_path, monkeypatch):
    """The CPU has no such statistics: allocations of three runs stand for a GPU's."""
    path = str(write_diffusers_folder(tmp_path / "model", tiny_config(num_layers=1, num_single_layers=1)))
    pool = PoolRank(0, 1, str(tmp_path))
    pool.load("m", path)
    reference, tensors = flux_tensors()
    peaks = iter((700, 100, 900))
    monkeypatch.setattr(memory, "begin_peak", lambda device: 1000)
    monkeypatch.setattr(memory, "peak_beside", lambda device, before: next(peaks) if before == 1000 else 0)
    answers = [pool.run(Forward("m", reference), tensors)[0].details for _ in range(2)]
    # CUDA's own, which no allocation shows, is predicted with the rest, and so it is told with the rest.
    size = pool.weights("m").size + int(CONTEXT_BYTES)
    assert [each.used_bytes - size for each in answers] == [700, 700]  # a recording that is replayed takes nothing anew
    assert answers[0].memory_bytes == 0  # nothing is predicted for a CPU
    assert answers[1].memory_bytes == size + 700
    reference, tensors = flux_tensors(rows=2)
    other = pool.run(Forward("m", reference), tensors)[0].details
    assert (other.memory_bytes, other.used_bytes - size) == (0, 900)


def test_the_client_hears_of_the_gpu_that_used_the_most():
    for used in ((3, 9), (9, 3), (0, 0)):
        job = ActiveJob(1, 2)
        for rank in range(2):
            job.answer(Frame(Ready(1, rank, {}), b"", None))
        job.phase = "running"
        for rank, each in enumerate(used):
            details = msgspec.structs.replace(PLAN, used_bytes=each)
            job.answer(Frame(Done(1, rank, Finished("plan", details=details)), b"", None))
        told = job.told
        assert told.message.answer.details == msgspec.structs.replace(PLAN, used_bytes=max(used))
        if told.header:  # what goes over the wire is what it says
            assert decode_header(told.header, 0, 0) == told.message
        assert bool(told.header) == (used[1] > used[0])
