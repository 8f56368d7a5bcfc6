"""Whatever an artist does in whatever order, each picture is Load Diffusion Model's, and only a rank that was killed in
the middle of a prompt costs that prompt: a random sequence, whose seed is printed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tiny_lora import FLUX, SD3, write_lora

from .comfy_host import ComfyHost, Run
from .test_graph_stays_a_graph import pool_pids
from .test_lora import Lora, assert_same, with_loras
from .workflow import MODEL, SAMPLER, SAVE, Workflow

pytestmark = pytest.mark.host

SEED = "RANDOM_PROMPTS_SEED"
"""Environment variable: plays a sequence again."""
SHORT = 60
LORAS = ("lora", "lokr", "loha", "diff")
OTHERS = ("schnell.safetensors", "canny.safetensors")
"""Models that no LoRA of these is made for."""


class Artist:
    """Does one thing after the other.

    Args:
        seed: of what is done.

    Attributes:
        done: what was done, in words.
    """

    def __init__(self, host: ComfyHost, seed: int):
        self.done: list[str] = []
        self._host = host
        self._dice = random.Random(seed)
        self._workflow, self._loras = Workflow(steps=2), ()
        self._acted = False  # what comes meanwhile has come
        self._between: dict[Callable[[], None], int] = {
            self._nothing: 8, self._kill_idle: 2, self._free: 1, self._unload: 1, self._park: 1, self._restart: 1,
        }  # fmt: skip
        self._meanwhile: dict[Callable[[Run], None] | None, int] = {None: 10, self._cancel: 2, self._kill: 1}

    def act(self) -> None:
        """One prompt, with what comes before and meanwhile, and the same by Load Diffusion Model."""
        self._draw(self._between)()
        self._change()
        meanwhile = self._draw(self._meanwhile)
        parallel = self._workflow.on(
            self._draw({"cpu:1": 1, "cpu:2": 4, "cpu:3": 1}), self._draw({"KSampler": 3, "ParallelSampler": 2})
        )
        self.done.append(f"{parallel} {self._loras} {meanwhile.__name__ if meanwhile else ''}")
        self._acted = False
        run = self._host.run(with_loras(parallel.prompt(), *self._loras), meanwhile)
        if self._acted and run.interrupted and meanwhile == self._cancel:
            return
        if self._acted and run.error is not None and meanwhile == self._kill:
            assert "The next prompt starts fresh workers" in run.error["exception_message"]
            return
        assert run.error is None, run.error["exception_message"]
        assert not run.interrupted
        wanted = self._host.run(with_loras(self._workflow.on("native", "KSampler").prompt(), *self._loras))
        assert_same(self._host.latent(run, SAVE), self._host.latent(wanted, SAVE))

    def _draw(self, weights):
        return self._dice.choices([*weights], [*weights.values()])[0]

    def _change(self) -> None:
        """Another seed at least, so that nothing comes from ComfyUI's cache; often that is all."""
        dice = self._dice
        self._workflow = replace(self._workflow, seed=dice.randrange(1 << 30))
        for change in dice.sample(("model", "size", "prompt", "sampler", "loras"), dice.choice((0, 0, 1, 1, 2))):
            if change == "model":
                others = OTHERS if self._host.small_flux else ()
                model = dice.choice((MODEL, MODEL, "plan.safetensors", *others))
                self._workflow = replace(self._workflow, model=model)
            elif change == "size":
                size = (0, dice.choice((1, 1, 2, 3)), dice.choice((8, 13, 14)), dice.choice((10, 19, 20)))
                self._workflow = replace(self._workflow, latent=size)
            elif change == "prompt":
                lengths = (dice.choice((7, 9)), dice.choice((5, 7)))
                self._workflow = replace(self._workflow, lengths=lengths, cfg=dice.choice((1.0, 4.0)))
            elif change == "sampler":
                self._workflow = replace(self._workflow, sampler=dice.choice(("euler", "dpmpp_2m", "uni_pc")))
            else:
                files = dice.sample(LORAS, dice.choice((0, 1, 1, 2)))
                self._loras = tuple(Lora(f"random-{file}", round(dice.uniform(-1, 1), 2)) for file in files)
        if self._workflow.model in OTHERS:
            self._loras = ()

    def _nothing(self) -> None:
        pass

    def _kill_idle(self) -> None:
        time.sleep(1.5)  # so long after a job nothing of it goes on
        if pids := sorted(pool_pids(self._host)):
            self.done.append("kill a rank that is idle")
            os.kill(self._dice.choice(pids), signal.SIGKILL)
            time.sleep(self._dice.choice((0, 0.005, 0.02, 1)))

    def _free(self) -> None:
        self.done.append("free")
        self._host.post("/free", {"unload_models": True, "free_memory": self._dice.random() < 0.5})

    def _unload(self) -> None:
        self.done.append("unload")
        self._host.post("/parallel_dit/unload")

    def _park(self) -> None:
        self.done.append("park")
        self._host.post("/parallel_dit/park")

    def _restart(self) -> None:
        self.done.append("restart")
        self._host.post("/parallel_dit/restart")

    def _at_work(self, so_far: Run) -> bool:
        """Whether the sampler runs, for the first time that this is asked."""
        if self._acted or SAMPLER not in so_far.executed[-1:]:
            return False
        self._acted = True
        return True

    def _cancel(self, so_far: Run) -> None:
        if self._at_work(so_far):
            self._host.interrupt()

    def _kill(self, so_far: Run) -> None:
        if self._at_work(so_far) and (pids := sorted(pool_pids(self._host))):
            os.kill(self._dice.choice(pids), signal.SIGKILL)


@pytest.fixture(scope="module")
def host(host):
    """ComfyUI with LoRA files for the models of the tests."""
    folder = host.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    for number, kind in enumerate(LORAS):
        write_lora(folder / f"random-{kind}.safetensors", FLUX if host.small_flux else SD3, kind=kind, seed=number)
    return host


@pytest.mark.parametrize(
    "seconds", [pytest.param(SHORT, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.long)]
)
def test_any_sequence_of_prompts_gives_the_pictures_of_load_diffusion_model(host, seconds):
    # CI draws the same sequence each time; the long one before a release draws a new one.
    seed = int(os.environ.get(SEED) or (1 if seconds == SHORT else random.SystemRandom().randrange(1 << 30)))
    print(f"{SEED}={seed}")
    artist = Artist(host, seed)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            artist.act()
    except BaseException:
        print("What was done:", *artist.done[-12:], sep="\n")
        for log in sorted((host.base / "pools").glob("pool-*.log"), key=lambda log: log.stat().st_mtime)[-2:]:
            print(log.name, *log.read_text(errors="replace").splitlines()[-30:], sep="\n")
        raise
    print(f"{len(artist.done)} prompts and other acts")
