"""What PipeFusion changes in a picture: PSNR and SSIM against one GPU over patches and warm-up steps.

    python -m benchmarks.pipefusion_quality --out benchmarks/results          # ten minutes of one CPU core
    python -m benchmarks.pipefusion_quality --checkpoint flux1-dev.safetensors --prompt prompt.safetensors \
        --vae FOLDER --size 1024 --device cuda --dtype bfloat16 --out DIR

One GPU does. FOLDER is `FLUX.1-dev/vae` of diffusers' download, which also makes the prompt:

    pipeline = diffusers.FluxPipeline.from_pretrained(
        "FLUX.1-dev", transformer=None, vae=None, torch_dtype=torch.bfloat16
    )
    context, y, _ = pipeline.encode_prompt("a lighthouse in the rain", None)
    tensors = {"context": context, "y": y, "guidance": torch.tensor([3.5])}
    safetensors.torch.save_file(tensors, "prompt.safetensors")

All blocks run as one stage in one process: the number of stages does not change the numbers
(tests/parallel_runtime/test_pipefusion.py), nor does an exact split of the tokens, so neither is a column. Needs
matplotlib for the plot.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.denoising.denoise import Denoising
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer
from parallel_runtime.networks.latent_patches import Patch
from parallel_runtime.pipefusion.denoise import PipelineDenoising
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.requests import ConditioningRef, Sample

from .lone_stage import LoneRunner, stage_of
from .picture_distance import psnr, ssim
from .quality_models import Subject, make_random, open_emoji, open_real
from .quality_report import table, write_report

PATCHES = range(2, 9)
WARMUPS = range(1, 5)
LENGTHS = (4, 8, 20, 28)
"""Numbers of steps for which the first of SHOWN is measured too."""
Seen = dict[str, torch.Tensor]
"""A run's "latent", and the "picture" that it is decoded to."""
EMOJI = Path(__file__).parent / "emoji" / "model"
SHOWN = ((4, 1), (8, 1), (8, 4))
"""Patches and warm-up steps whose pictures are kept."""


@dataclass
class Drift:
    """A control that measures how much keys and values change from one step to the next."""

    stage: ParallelTransformer
    changes: list[float] = field(default_factory=list)
    _before: list[torch.Tensor] = field(default_factory=list)

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """Compare with the step before: the mean over all layers of |change| / |keys|, and of the values likewise."""
        assert self.stage.stages.now is not None
        now = [kept.clone() for kept in self.stage.stages.now.patch.kept]
        if self._before:
            pairs = zip(now, self._before, strict=True)
            self.changes.append(statistics.mean(((a - b).norm() / a.norm()).item() for a, b in pairs))
        self._before = now

    def before_compiling(self) -> None:
        pass

    def check_cancel(self) -> None:
        """Nobody cancels."""

    def loading(self, done: int, total: int) -> None:
        """Nobody waits."""

    def measuring(self) -> None:
        """Nobody waits."""

    def vote_stop(self, members: dist.ProcessGroup | None) -> Callable[[], bool]:
        """Nobody cancels."""
        return lambda: False

    def all_stop(self, members: dist.ProcessGroup | None) -> bool:
        """Nobody cancels."""
        return False


class Quiet(Drift):
    """A control that does nothing."""

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """Nobody listens."""


class BlindRunner(LoneRunner):
    """Patches that see the text and themselves, not one another: what is lost without stale keys and values.

    The scale for the other numbers: where this is close to the exact picture, attention mixes too little to tell.
    """

    def evaluate(self, inputs: Any, timestep: torch.Tensor, patch: Patch | None) -> list[torch.Tensor] | None:
        """See `StageRunner.evaluate`."""
        stage = self.stage.stages.now
        assert stage is not None
        kept, image = stage.patch.whole, self.patches[-1].tokens[1]

        def own(*given: Any) -> Any:
            both = kept(*given)
            if patch is None:
                return both
            dim, (key, value) = given[2], both
            text = key.shape[dim] - image  # comes first
            rows = torch.cat([torch.arange(text), text + torch.arange(*patch.tokens)]).to(key.device)
            return key.index_select(dim, rows), value.index_select(dim, rows)

        stage.patch.whole = own  # type: ignore[assignment, method-assign]
        try:
            return super().evaluate(inputs, timestep, patch)
        finally:
            stage.patch.whole = kept  # type: ignore[method-assign]


@dataclass
class Sampling:
    """Runs one subject under many schedules."""

    subject: Subject

    def __post_init__(self) -> None:
        self.stage = stage_of(self.subject.transformer, FLUX, single_rank_mesh())

    def exact(self, sigmas: torch.Tensor, control: Drift) -> Seen:
        """What one GPU computes."""
        return self.run(sigmas, 1, len(sigmas) - 1, control)

    def sweep(
        self, sigmas: torch.Tensor, warmups: Iterable[int], control: Drift, runner_type: type[LoneRunner]
    ) -> Iterator[tuple[int, int, Seen]]:
        """All numbers of patches, with each of the warm-ups."""
        for patches, warmup in itertools.product(PATCHES, warmups):
            yield patches, warmup, self.run(sigmas, patches, warmup, control, runner_type)

    def run(
        self,
        sigmas: torch.Tensor,
        patches: int,
        warmup: int,
        control: Drift,
        runner_type: type[LoneRunner] = LoneRunner,
    ) -> Seen:
        """One run of the sampler."""
        subject = self.subject
        request = Sample("m", "euler", (ConditioningRef(0),), 1.0)
        denoising = Denoising(request, subject.dtype)
        runner = runner_type(self.stage, [Conditioning(subject.text)], subject.x.to(subject.dtype), patches)
        tensors = {"x": subject.x, "sigmas": sigmas, "timesteps": sigmas.to(subject.x.device)}
        latent = PipelineDenoising(denoising, runner, warmup, tensors, control).run()
        assert latent is not None, "the only stage is the first"
        return {"latent": latent, "picture": subject.decode(latent)}


def flow_sigmas(steps: int, shift: float) -> torch.Tensor:
    """(steps + 1,) from 1 to 0, evenly spaced and then shifted towards 1 as FLUX and SD3 do (Esser et al. 2024)."""
    even = torch.linspace(1, 0, steps + 1)
    return shift * even / (1 + (shift - 1) * even)


def compare(found: Seen, exact: Seen) -> dict[str, float]:
    """PSNR and SSIM of latent and picture, each the mean over the pictures."""
    return {
        f"{name}_{measure.__name__}": statistics.mean(
            measure(one[None], other[None]) for one, other in zip(found[name], exact[name], strict=True)
        )
        for name in exact
        for measure in (psnr, ssim)
    }


@torch.no_grad()
def measure(subject: Subject, steps: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the distances of all schedules from the exact run, with how much changes per step; and some pictures."""
    sampling, sigmas = Sampling(subject), flow_sigmas(steps, subject.shift)
    drift, quiet = Drift(sampling.stage), Quiet(sampling.stage)
    exact = sampling.exact(sigmas, drift)
    pictures = {"one GPU": exact["picture"]}
    grid, blind, lengths = [], [], []
    for patches, warmup, found in sampling.sweep(sigmas, WARMUPS, quiet, LoneRunner):
        grid.append({"patches": patches, "warmup": warmup, **compare(found, exact)})
        if (patches, warmup) in SHOWN:
            pictures[f"M = {patches}, W = {warmup}"] = found["picture"]
    for patches, _, found in sampling.sweep(sigmas, (1,), quiet, BlindRunner):
        blind.append({"patches": patches, **compare(found, exact)})
        if patches == SHOWN[0][0]:
            pictures[f"M = {patches}, blind"] = found["picture"]
    for count in LENGTHS:
        others = flow_sigmas(count, subject.shift)
        found = sampling.run(others, *SHOWN[0], quiet)
        lengths.append({"steps": count, **compare(found, sampling.exact(others, quiet))})
    result = {
        "title": subject.title,
        "pictures": len(subject.x),
        "tokens": math.prod(subject.x.shape[-2:]) // 4,
        # The last step is told of after the last evaluation, which the step before has been compared with already.
        "change_per_step": drift.changes[:-1],
        "grid": grid,
        "blind": blind,
        "lengths": lengths,
    }
    return result, pictures


def read_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a FLUX.1 file; without one, the stand-ins")
    parser.add_argument("--prompt", type=Path, help="safetensors file of context, y and guidance")
    parser.add_argument("--vae", type=Path, help="diffusers folder")
    parser.add_argument("--size", type=int, default=1024, help="of the checkpoint's picture")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=64, help="that the model of benchmarks/emoji draws; 0 without")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.checkpoint and not options.prompt:
        parser.error("--checkpoint needs --prompt, the text embeddings that the model is to draw")
    return options


def make_subjects(options: argparse.Namespace) -> list[Callable[[], Subject]]:
    """What is measured, made one after the other."""
    if options.checkpoint:
        dtype = getattr(torch, options.dtype)
        side = options.size // 8
        given = (options.checkpoint, options.prompt, options.vae, side, options.device, dtype)
        return [lambda: open_real(*given)]
    subjects: list[Callable[[], Subject]] = [lambda: make_random(0, side=32), lambda: make_random(1, side=32)]
    if options.prompts:
        subjects.append(lambda: open_emoji(EMOJI, options.prompts))
    return subjects


def main() -> None:
    """Command line."""
    options = read_options()
    results: list[dict[str, Any]] = []
    pictures: dict[str, torch.Tensor] = {}
    started = time.perf_counter()
    for make in make_subjects(options):
        result, pictures = measure(make(), options.steps)
        results.append(result)
        print(table(result), f"\n\n{time.perf_counter() - started:.0f} s\n", flush=True)
    if options.out:
        run = f"euler, {options.steps} steps, torch {torch.__version__}"
        write_report(options.out, run, results, pictures)


if __name__ == "__main__":
    main()
