"""The steps of a run but the first are prepared already: one message each way, and faults cost what they always did."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import NotLoadedError, PoolError, RequestError, SegmentError
from parallel_runtime.patching.patch_data import UNPATCHED
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Forward, Load, Release, Sample, Step
from tests.patience import SOON
from tests.tiny_flux import weights_file, write_diffusers_folder
from tests.workers.loops import make_loop
from workers.client.calls import Calls
from workers.client.client import PoolClient
from workers.client.held import Mirror
from workers.client.node_requests import ModelRequest, Reply, Submission
from workers.client.running_pool import RunningPool
from workers.launch import PoolSpec
from workers.wire.tensors import Segment, Transport


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_diffusers_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def client():
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    yield client
    client.close()


@pytest.fixture
def asked(monkeypatch) -> list[type]:
    """What is asked of pools, in order."""
    kinds: list[type] = []
    submit = RunningPool.submit

    def note(self: RunningPool, submission: Submission) -> Any:
        kinds.append(type(submission.request))
        return submit(self, submission)

    monkeypatch.setattr(RunningPool, "submit", note)
    return kinds


def given(seed: int = 0, text: int = 5, batch: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(batch, text, 64, generator=generator)
    return {"context": context, "y": torch.randn(batch, 32, generator=generator), "guidance": torch.full((batch,), 3.5)}


def latent(seed: int, batch: int = 1, height: int = 6) -> torch.Tensor:
    return torch.randn(batch, 16, height, 8, generator=torch.Generator().manual_seed(seed))


def model(path: str, devices: int = 2) -> ModelRequest:
    return ModelRequest(path, "float32", ParallelConfig(devices=f"cpu:{devices}"))


@pytest.mark.slow
def test_steps_give_what_prepared_calls_give(client, path, asked):
    def run(x: torch.Tensor, sigma: float, text: dict[str, torch.Tensor], devices: int = 2) -> torch.Tensor:
        return client.forward(model(path, devices), x, torch.full((x.shape[0],), sigma), text)

    calls = [(latent(step), 1 - step / 4, given()) for step in range(3)]
    calls += [(latent(step), 1 - step / 4, given(1, 3)) for step in range(2)]  # another prompt
    calls += [(latent(step, 2), 1 - step / 4, given(batch=2)) for step in range(2)]  # another batch
    calls += [(latent(4), 0.1, given())]  # the first prompt again
    outputs = [run(*call) for call in calls]
    assert asked == [Load, Forward, Step, Step, Forward, Step, Forward, Step, Step]
    for output, call in zip(outputs, calls, strict=True):
        alone = run(*call, devices=1)
        assert (output - alone).abs().max() < 1e-5 * alone.abs().max()


@pytest.mark.slow
def test_whatever_changes_the_model_or_ends_in_an_error_is_followed_by_a_prepared_call(client, path, asked):
    def step(text: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        return client.forward(model(path), latent(0), torch.tensor([0.5]), text or given())

    first = step()
    asked.clear()
    request = make_loop("euler", torch.tensor([0.9, 0.0]), latent(1), {0: given()}, 1.0)
    client.sample(model(path), request)
    assert torch.equal(step(), first)  # a loop in between changes nothing
    client.load(model(path))
    assert torch.equal(step(), first)
    client.release(model(path))
    assert torch.equal(step(), first)
    with pytest.raises(Exception, match="does not take unknown"):
        step({**given(), "unknown": torch.zeros(1)})
    assert torch.equal(step(), first)
    assert asked == [Sample, Step, Load, Forward, Release, Load, Forward, Forward, Forward]


def test_a_step_that_the_ranks_do_not_keep_is_refused_by_all_of_them_and_prepared_instead(
    client, path, asked, monkeypatch
):
    def step() -> torch.Tensor:
        return client.forward(model(path), latent(0), torch.tensor([0.5]), given())

    first = step()
    pids = client.status().pids
    asked.clear()
    with monkeypatch.context() as wrong:  # the client is wrong about what they keep, once
        found = iter([10_000])
        wrong.setattr(client._calls._prepared, "find", lambda fits: next(found, None))
        assert torch.equal(step(), first)
    assert asked == [Step, Load, Forward]
    number = next(reversed(client._calls._prepared))
    tensors = {"x": latent(0), "timestep": torch.tensor([0.5])}
    with pytest.raises(Exception, match="does not take unknown"):
        client.forward(model(path), latent(0), torch.tensor([0.5]), {**given(), "unknown": torch.zeros(1)})
    # A rank may have lost it when the request failed there, so all have.
    with pytest.raises(NotLoadedError, match=f"keep no call of number {number}"):
        client._submit(Submission(request=Step(number), tensors=tensors))
    assert torch.equal(step(), first)
    assert client.status().pids == pids


def test_a_conditioning_that_its_owner_wrote_into_is_another_one(client, path, asked):
    def step(text: dict[str, torch.Tensor]) -> torch.Tensor:
        return client.forward(model(path), latent(0), torch.tensor([0.5]), text)

    text, other = given(20), given(21)
    expected, others = step(text), step(other)
    assert torch.equal(step(text), expected)
    before = {name: tensor.clone() for name, tensor in text.items()}
    asked.clear()
    for contents, wanted in ((other, others), (before, expected)):
        for name, tensor in contents.items():
            text[name].copy_(tensor)
        assert torch.equal(step(text), wanted)
    assert asked == [Step, Step]


def test_a_prediction_of_no_numbers_is_no_success_even_of_the_last_step(client, path, asked, tmp_path):
    damaged = Path(shutil.copytree(path, tmp_path / "damaged"))
    weights = load_file(weights_file(damaged))
    weights["proj_out.bias"][0] = torch.nan
    save_file(weights, weights_file(damaged))
    pids = client.load(model(path)) and client.status().pids
    asked.clear()
    for _ in range(2):
        with pytest.raises(RequestError, match="The model's prediction came out with values that are no numbers"):
            client.forward(model(str(damaged)), latent(0), torch.tensor([0.5]), given())
    assert asked == [Load, Forward, Step]
    assert client.forward(model(path), latent(0), torch.tensor([0.5]), given()).isfinite().all()
    assert client.status().pids == pids


@pytest.mark.parametrize("texts", [(5, 5), (5, 3)])
def test_two_prompts_in_turn_are_steps_too_and_never_mistaken_for_each_other(client, path, asked, texts):
    prompts = [given(10 + number, text) for number, text in enumerate(texts)]
    expected = [client.forward(model(path, 1), latent(3), torch.tensor([0.4]), prompt) for prompt in prompts]
    outputs = [client.forward(model(path), latent(3), torch.tensor([0.4]), prompt) for prompt in prompts * 3]
    asked.clear()
    outputs += [client.forward(model(path), latent(3), torch.tensor([0.4]), prompt) for prompt in prompts * 2]
    assert asked == [Step] * 4
    for number, output in enumerate(outputs):
        one = expected[number % 2]
        assert (output - one).abs().max() < 1e-5 * one.abs().max()
    changed = {**prompts[0], "guidance": torch.tensor([1.5 + texts[1]])}  # of the same shapes
    assert not torch.allclose(client.forward(model(path), latent(3), torch.tensor([0.4]), changed), expected[0])
    assert asked[-1] is Forward


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_before_they_are_sent(client, path, asked, bad):
    x = latent(0)
    text = given(20)
    for _ in range(2):  # at the first call, which is prepared, and at a step
        client.forward(model(path), x, torch.tensor([0.5]), text)
        broken = x.clone()
        broken[0, 1, 0, 1] = bad
        with pytest.raises(RequestError, match="input latent"):
            client.forward(model(path), broken, torch.tensor([0.5]), text)
    assert client.status().state == "idle"


def no_memory(*_: Any) -> Any:
    raise SegmentError("No memory.", "")


def put_elsewhere(self: Transport, *given: Any, put: Any = Transport.put) -> Any:
    specs, buffers, segment = put(self, *given)
    return specs, buffers, "/proc/1/fd/99999" if segment else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name", "broken"),
    [(Segment, "create", no_memory), (Transport, "put", put_elsewhere)],  # the second: ranks may not open the client's
)
def test_without_shared_memory_the_socket_carries_the_same(client, path, monkeypatch, part, name, broken):
    expected = client.forward(model(path), latent(0), torch.tensor([0.5]), given())
    monkeypatch.setattr(part, name, broken)
    other = PoolClient(PoolSpec("cpu", (0, 1)))
    outputs = [other.forward(model(path), latent(0), torch.tensor([0.5]), given()) for _ in range(3)]
    other.close()
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.slow
def test_more_kinds_than_are_kept_are_forgotten_by_the_ranks_too(client, path, asked):
    heights = range(10, 10 + 20)
    for _ in range(2):
        for height in heights:
            client.forward(model(path), latent(0, height=height), torch.tensor([0.5]), given())
    assert asked.count(Forward) == 2 * len(heights)  # each was forgotten when it came back
    client.forward(model(path), latent(1, height=heights[-1]), torch.tensor([0.5]), given())
    assert asked[-1] is Step


def test_of_more_than_a_mirror_takes_the_oldest_goes_first():
    mirror: Mirror[int, str] = Mirror()
    for number in range(20):
        mirror.hold(number, f"kind {number}", most=16)
    assert tuple(mirror) == (*range(4, 20),)
    assert [mirror.find(lambda known, n=n: known == f"kind {n}") for n in (3, 4)] == [None, 4]
    mirror.hold(20, "kind 20", most=16)  # 4 was used a moment ago
    assert tuple(mirror) == (*range(6, 20), 4, 20)


def test_a_call_that_fails_before_it_ends_leaves_nothing_with_the_ranks():
    asked: list[Submission] = []

    def submit(submission: Submission) -> Reply:
        asked.append(submission)
        raise Cancelled

    calls = Calls(submit)
    for _ in range(2):
        with pytest.raises(Cancelled):
            calls.run("m", torch.zeros(1, 2), torch.zeros(1), given(), UNPATCHED)
        calls.forget()  # as the client does
    _, second = (each.request for each in asked)
    assert second.kept_kinds == (second.kind,)
    assert second.kept == (second.conditioning.id,)


@pytest.mark.long_but_for("1-planted fault-1", "2-ended in the middle of a job-0")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "says"), [(1, "planted fault"), (2, "ended in the middle of a job")])
def test_a_fault_in_a_step_costs_the_pool_and_the_next_call_works(faulty_pool, rank, number, says):
    pool = faulty_pool()
    for _ in range(3):
        assert torch.equal(pool.forward(), torch.tensor([[0.0, 0.0, 5.0, 6.0]]))
    before = pool.client.pool.pid
    faults = (-number, 0) if rank == 0 else (0, -number)
    started = time.monotonic()
    with pytest.raises(PoolError, match=rf"Worker {rank}.*{says}"):
        pool.forward(faults)
    assert time.monotonic() - started < SOON  # a rank that gets nowhere is found after a minute
    assert torch.equal(pool.forward(), torch.tensor([[0.0, 0.0, 5.0, 6.0]]))
    assert pool.client.pool.pid != before  # what a rank has read is not done again
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
def test_a_step_that_hangs_is_found(faulty_pool, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_STALL_SECONDS", "5")
    pool = faulty_pool()
    pool.forward()
    with pytest.raises(PoolError, match=r"Worker 1 .* made no progress for \d+ seconds"):
        pool.forward((0, -3))
    pool.check_works()


@pytest.mark.slow
def test_thousands_of_steps_leave_nothing_behind(faulty_pool):
    pool = faulty_pool()
    for _ in range(50):
        pool.forward()
    processes = [psutil.Process(), *pool.processes]
    before = [(process.num_fds(), process.num_threads()) for process in processes]
    started, threads = time.monotonic(), threading.active_count()
    for _ in range(1000):
        pool.forward()
    assert time.monotonic() - started < 200
    assert [(process.num_fds(), process.num_threads()) for process in processes] == before
    assert threading.active_count() == threads
