"""What fails in a loop of one of ComfyUI's samplers in the ranks costs that prompt, under every node that samples: a
sentence tells of it, and the next prompt gives Load Diffusion Model's latent."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from safetensors.torch import load_file, save_file

from tests.patience import wait_until

from .comfy_host import ComfyHost, Run, beside
from .test_graph_stays_a_graph import LONG, pool_pids
from .workflow import MODEL, SAMPLER, SAVE

pytestmark = [pytest.mark.host, pytest.mark.slow]

STALL_SECONDS = 10
DAMAGED = "damaged.safetensors"
IN_RANKS = replace(LONG, sampler="er_sde")
"""By ComfyUI's function."""
NODES = {
    "KSampler": IN_RANKS,
    "KSampler Advanced": replace(IN_RANKS, sampler_node="KSamplerAdvanced"),
    "SamplerCustomAdvanced": replace(IN_RANKS, sampler_node="SamplerCustomAdvanced", split=2),
}
"""The last with a fault in the second of two loops."""


def _signal(number: signal.Signals) -> Callable[[ComfyHost], None]:
    return lambda host: os.kill(max(pool_pids(host)), number)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Args:
        happens: done while the loop runs.
        says: what the artist reads; "" where the prompt is cancelled.
        fresh: the next prompt has a fresh pool.
    """

    happens: Callable[[ComfyHost], None]
    says: str
    fresh: bool
    model: str = MODEL


_FRESH = r"in the middle of a job\. The next prompt starts fresh workers; the log .*is /"
FAULTS = {
    "a rank is killed": Fault(_signal(signal.SIGKILL), rf"^Worker \d \(process \d+\) ended {_FRESH}", True),
    "a rank hangs": Fault(
        _signal(signal.SIGSTOP),
        rf"^Worker \d \(process \d+\) made no progress for \d+ seconds {_FRESH}",
        True,
    ),
    "cancel": Fault(ComfyHost.interrupt, "", False),
    "NaN": Fault(
        lambda host: None, r"^The latent came out with values that are no numbers .*model file", False, DAMAGED
    ),
}


@pytest.fixture(scope="module")
def impatient(host, tmp_path_factory) -> Iterator[ComfyHost]:
    """A ComfyUI whose ranks may hang for some seconds only, and a file with a weight that is no number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLEL_DIT_STALL_SECONDS", str(STALL_SECONDS))
        comfy = beside(host, tmp_path_factory.mktemp("impatient") / "base")
    folder = comfy.base / "models" / "diffusion_models"
    tensors = load_file(folder / MODEL)
    next(tensor for tensor in tensors.values() if tensor.ndim == 2)[0, 0] = float("nan")
    save_file(tensors, folder / DAMAGED)
    yield comfy
    comfy.stop()
    assert wait_until(lambda: not pool_pids(comfy))


@pytest.mark.long_but_for(
    "KSampler-a rank hangs",
    "KSampler-NaN",
    "SamplerCustomAdvanced-a rank is killed",
    "SamplerCustomAdvanced-cancel",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("by", NODES)
def test_a_fault_in_a_loop_costs_its_prompt_and_the_next_one_is_right(impatient, by, fault):
    host, it = impatient, FAULTS[fault]
    short = replace(NODES[by], steps=4, latent=(0, 1, 14, 20))
    wanted = host.latent(host.run(short.on("native").prompt()), SAVE)
    assert host.run(replace(short, seed=6).prompt()).error is None
    before = pool_pids(host)
    happened = False

    def happen(so_far: Run) -> None:
        nonlocal happened
        if not happened and any(node == SAMPLER for node, _, _ in so_far.progress):
            happened = True
            it.happens(host)

    workflow = NODES[by] if it.model == MODEL else replace(NODES[by], steps=4, split=0, model=it.model)
    run = host.run(workflow.prompt(), happen)
    assert happened
    assert run.interrupted is not bool(it.says)
    if it.says:
        assert re.search(it.says, run.error["exception_message"]), run.error["exception_message"]
        assert run.error["node_id"] == SAMPLER
    latent = host.latent(host.run(short.prompt()), SAVE)
    assert (latent - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert host.last_run()["loop"] == "pool"
    assert (pool_pids(host) != before) is it.fresh
