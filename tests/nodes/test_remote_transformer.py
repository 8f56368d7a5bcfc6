"""The transformer that is elsewhere: checks before it sends, remembers what is loaded, records when it is asked to."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from nodes import carried_patches
from nodes.carried_patches import CarriedPatches
from nodes.panel.run_history import HISTORY, RunHistory
from nodes.remote_transformer import RemoteTransformer
from nodes.run_notices import STOPPED, RunNotices
from nodes.transformer_call import TransformerCall
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PoolError, RequestError
from parallel_runtime.requests.requests import Finished, PlanDetails
from parallel_runtime.said import said
from tests.workers.loops import make_loop
from workers.client.life import Wait
from workers.client.node_requests import ModelRequest, never


class DoublingPool:
    """Stands in for PoolClient: the prediction is twice the latent."""

    def __init__(self, stages: int = 1):
        self.requests = []
        self.stages = stages
        self.compiles = ()  # times at which a rank says, before the next result, that it compiles
        self.now = 0.0
        self.ran = None  # the plan, as the ranks say it
        self.held = 0
        self.dies = False
        self.known = False
        self.details = None
        self.waits_for = Wait()
        self.keeper = self
        self.ahead = SimpleNamespace(served=None)
        self.loads = ()  # what a load waits for, each time that the caller is asked whether to cancel

    def load(self, model, should_cancel, make_room=None):
        self.requests.append("load")
        self._bring(should_cancel)
        self.held = 100
        return SimpleNamespace(bytes_per_rank=100, stages=self.stages)

    def forward(self, model, x, timestep, conditioning, patches, should_cancel):
        self.requests.append("forward")
        self._bring(should_cancel)
        self.held = 100
        self._compile(should_cancel)
        return 2 * x.float()

    def sample(self, model, request, patches, on_progress, should_cancel):
        self.requests.append("sample")
        self._compile(should_cancel)
        on_progress(0, 1, None)
        return 2 * request.x

    def _bring(self, should_cancel):
        for wait in self.loads:
            self.waits_for = wait
            should_cancel()
        self.waits_for, self.loads = Wait(), ()

    def _compile(self, should_cancel):
        for moment in self.compiles:
            self.now, self.waits_for = moment, Wait("compile")
            should_cancel()
        self.waits_for, self.compiles = Wait(), ()

    def release(self, model, park=False, should_cancel=never):
        self.requests.append("release")
        if self.dies:
            raise PoolError("Worker 1 (process 5) ended while the workers were idle.", "")
        freed, self.held = self.held, 0
        return freed

    def knows(self, model):
        return self.known

    def held_bytes(self, model):
        return self.held


def make_remote(devices: str = "cpu:2", stages: int = 1) -> tuple[RemoteTransformer, DoublingPool]:
    pool = DoublingPool(stages)
    config = ParallelConfig(devices=devices, pipe=stages if stages > 1 else None)
    model = ModelRequest("model.safetensors", "bfloat16", config)
    return remote_of(pool, model), pool


def remote_of(pool: DoublingPool, model: ModelRequest, notices=None):
    return RemoteTransformer(model, notices or RunNotices(lambda text: None), lambda config: pool)


def listen(remote: RemoteTransformer, pool: DoublingPool) -> list[str]:
    """The texts that it will show on the running node."""
    shown: list[str] = []
    remote.notices = RunNotices(shown.append, clock=lambda: pool.now)
    return shown


def make_call(x: torch.Tensor, control=None, **options) -> TransformerCall:
    return TransformerCall(x, torch.ones(len(x)), {"context": torch.ones(1, 2, 3)}, control, options)


def test_a_prediction_comes_back_in_the_type_of_the_latent():
    remote, _ = make_remote()
    x = torch.randn(2, 4, 6, 8, dtype=torch.bfloat16)
    output = remote.forward(make_call(x), never)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, 2 * x)


def test_a_function_that_no_rank_can_make_again_is_refused_by_name():
    remote, pool = make_remote()
    with pytest.raises(RequestError, match=r"functions that .* sets inside.*Remove the node"):
        remote.forward(make_call(torch.zeros(1, 4, 2, 2), control={"input": []}, patches={"a": [1]}), never)
    assert pool.requests == []


def test_the_network_gets_the_residuals_of_a_controlnet_and_options_that_are_data():
    remote, pool = make_remote()
    sent = []
    forward = pool.forward
    pool.forward = lambda model, x, timestep, conditioning, **more: (
        sent.append(conditioning) or forward(model, x, timestep, conditioning, **more)
    )
    control = {"input": [torch.ones(1, 3), None]}
    remote.forward(make_call(torch.zeros(1, 4, 2, 2), control=control, rope_options={"scale_x": 2.0}), never)
    assert sent[0]["control"] is control
    assert sent[0]["transformer_options"].value == {"rope_options": {"scale_x": 2.0}}
    with pytest.raises(RequestError, match=r"functions that .* sets inside.*Remove the node"):
        remote.forward(make_call(torch.zeros(1, 4, 2, 2), patches={"a": [1]}), never)
    assert pool.requests == ["forward"]


def test_what_a_run_remembers_belongs_to_a_run_that_is_over_when_it_ends(monkeypatch):
    monkeypatch.setattr(carried_patches, "_RUNNING", WeakKeyDictionary())
    remote, _ = make_remote()
    remote.functions.begin()
    number = remote.functions.kept_number(SimpleNamespace())
    remote.finish_run()
    other = CarriedPatches()
    other.begin()
    assert other.since > number


def test_capture_records_calls_and_sends_nothing():
    remote, pool = make_remote()
    call = make_call(torch.ones(2, 8, 6, 4))
    with remote.capture(channels=4) as calls:
        output = remote.forward(call, never)
    assert [(each.x, each.conditioning["context"]) for each in calls] == [(call.x, call.conditioning["context"])]
    assert output.shape == (2, 4, 6, 4)
    assert not output.any()
    assert pool.requests == []
    remote.forward(call, never)
    assert pool.requests == ["forward"]


def test_it_knows_what_the_pool_holds():
    remote, pool = make_remote()
    assert remote.release(False, never) == 0
    remote.load(never)
    assert (remote.size_bytes, remote.resident_bytes) == (100, 100)
    assert remote.release(False, never) == 100
    assert (remote.size_bytes, remote.resident_bytes) == (100, 0)
    remote.forward(make_call(torch.zeros(1, 4, 2, 2)), never)  # the pool has loaded it again
    assert remote.resident_bytes == 100
    pool.held = 0  # it died, or another model took the place
    assert (remote.size_bytes, remote.resident_bytes) == (100, 0)
    assert pool.requests == ["load", "release", "forward"]


def test_weights_that_two_stand_for_are_let_go_by_the_one_that_was_used_last():
    older, pool = make_remote()
    newer = remote_of(pool, older.model)
    older.load(never)
    assert older.resident_bytes == newer.resident_bytes + 100 == 100
    pool.known = True  # also while it is parked
    newer.load(never)
    assert (older.resident_bytes, newer.resident_bytes) == (0, 100)
    assert (older.kept, newer.kept) == (False, True)
    assert older.release(False, never) == 0
    assert "release" not in pool.requests
    older.forward(make_call(torch.ones(1, 4, 2, 2)), never)
    assert newer.release(False, never) == 0
    del older
    gc.collect()
    assert newer.release(False, never) == 100


@pytest.mark.parametrize(
    ("devices", "device", "shared"),
    [
        ("auto", "cuda:1", True),
        ("0,2", "cuda:2", True),
        ("0,2", "cuda:1", False),
        ("1,2", "cuda", True),  # the current device is 1
        ("0,2", "cuda", False),
        ("cpu:2", "cuda:0", False),
        ("auto", "cpu", False),
    ],
)
def test_it_knows_whether_the_pool_competes_for_comfyuis_memory(monkeypatch, devices, device, shared):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    remote, _ = make_remote(devices)
    assert remote.shares(torch.device(device)) is shared


@pytest.mark.parametrize("begun", [False, True])
def test_steps_that_were_done_before_are_timed_as_they_were_done(begun):
    remote, pool = make_remote()
    shown = listen(remote, pool)
    pool.ran = Finished("One rank.")
    pool.ahead.served = SimpleNamespace(steps=[1.0, 1.3]) if begun else None
    for _ in range(2 - begun):
        pool.now += 0.1
        remote.sample(make_loop("euler", torch.ones(3), torch.ones(1, 4, 2, 2), {}, 1.0), lambda *step: None, never)
    remote.finish_run()
    assert shown[-1].startswith("300 ms per step." if begun else "100 ms per step.")
    assert ("began with it" in shown[-1]) is begun


@pytest.mark.parametrize("in_pool", [False, True])
def test_the_running_node_shows_how_long_the_ranks_have_compiled(in_pool):
    remote, pool = make_remote()
    shown = listen(remote, pool)
    x = torch.ones(1, 4, 2, 2)

    def compute() -> None:
        if in_pool:
            request = make_loop("euler", torch.ones(2), x, {}, 1.0)
            remote.sample(request, lambda *step: shown.append("step"), never)
        else:
            remote.forward(make_call(x), never)
            shown.append("step")

    remote.notices.model = "flux.safetensors"
    pool.compiles = (100.0, 100.1, 101.0, 101.1, 142.0)  # two ranks, one of them for longer
    compute()
    compute()
    text = "Compiling flux.safetensors, once per machine: {} s."
    assert shown == [text.format(0), text.format(1), text.format(42), "step", "step"]


def test_the_plan_that_ran_its_latent_and_the_time_per_step_are_told_after_the_run():
    remote, pool = make_remote()
    shown = listen(remote, pool)
    remote.finish_run()
    assert shown == []  # nothing ran
    pool.ran = SimpleNamespace(plan="cfg 2: the batch of 2 is split 2 ways.")
    x = torch.ones(1, 4, 16, 24)
    for second in range(6):  # two calls a step, of which the first compiled
        pool.now = 10.0 + 0.05 * second
        remote.forward(make_call(x, sample_sigmas=torch.ones(4)), never)
    remote.finish_run()
    assert shown == ["100 ms per step. Latent 16 × 24. cfg 2: the batch of 2 is split 2 ways."]
    remote.notices.begin()
    remote.notices.loop([said("a mask"), said("a mask")])
    remote.forward(make_call(torch.ones(1, 4, 3, 8, 8)), never)
    remote.finish_run()
    why = "Sampled step by step, because the loop on these devices does not know a mask."
    assert shown[1].endswith(why)
    assert HISTORY.to_mapping()["runs"][0] | {"loop": "steps", "why": "a mask"} == HISTORY.to_mapping()["runs"][0]
    remote.notices.begin()
    remote.notices.loop([])
    remote.forward(make_call(torch.ones(1, 4, 3, 8, 8)), never)
    remote.finish_run()
    assert HISTORY.to_mapping()["runs"][0] | {"loop": "pool", "why": ""} == HISTORY.to_mapping()["runs"][0]
    assert shown[2:] == ["Latent 3 × 8 × 8. cfg 2: the batch of 2 is split 2 ways."]  # one may have compiled


def test_a_run_that_is_stopped_or_refused_leaves_the_last_good_one_as_it_is():
    shown: list[str] = []
    history = RunHistory()
    remote, pool = make_remote()
    notices = RunNotices(shown.append, lambda: pool.now, history=history)
    remote = remote_of(pool, remote.model, notices)
    pool.ran = SimpleNamespace(plan="One rank.")
    for whole in (True, False):
        notices.begin()
        for _ in range(3):
            pool.now += 0.1
            remote.forward(make_call(torch.ones(1, 4, 8, 8), sample_sigmas=torch.ones(4 if whole else 21)), never)
        remote.finish_run(whole)
    notices.begin()
    remote.finish_run(whole=False)  # refused before its first step
    assert shown[0].startswith("100 ms per step. Latent 8 × 8. One rank.")
    assert shown[1:] == [STOPPED, STOPPED]
    assert len(history.runs) == 1


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float32"}, {"config": ParallelConfig(compile="off")}, {"config": ParallelConfig(weights="host")}],
)
def test_a_speed_up_is_told_beside_a_run_of_the_same_kind_alone(other):
    history = RunHistory()
    remote, pool = make_remote()

    def run(model, ulysses: int) -> str:
        notices = RunNotices(lambda text: None, lambda: pool.now, history=history)
        one = remote_of(pool, model, notices)
        pool.ran = SimpleNamespace(plan="A plan.")
        degrees = {"ulysses": ulysses}
        pool.details = PlanDetails("FLUX.1", degrees, 1, (57,), 24, 57, 4096, 1)
        notices.begin()
        for _ in range(3):
            pool.now += 0.1
            one.forward(make_call(torch.ones(1, 4, 8, 8), sample_sigmas=torch.ones(4)), never)
        return notices.finish()

    assert "times as fast" not in run(remote.model, 1)
    assert "times as fast" not in run(replace(remote.model, **other), 2)
    assert "times as fast" in run(remote.model, 2)


def test_the_node_says_how_far_a_load_is():
    remote, pool = make_remote()
    shown = listen(remote, pool)
    pool.loads = [Wait(), Wait("weights", 0, 24_000_000_000), Wait("weights", 12_345_678_901, 24_000_000_000)]
    remote.load(never)
    assert shown == ["Loading: 0.0 of 24.0 GB.", "Loading: 12.3 of 24.0 GB."]
    pool.loads = [Wait("weights", 24_000_000_000, 24_000_000_000)]
    remote.forward(make_call(torch.zeros(1, 4, 2, 2)), never)
    remote.forward(make_call(torch.zeros(1, 4, 2, 2)), never)
    assert shown[2:] == ["Loading: 24.0 of 24.0 GB."]
