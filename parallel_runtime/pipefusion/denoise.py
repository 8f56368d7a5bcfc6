"""The denoising loop over a pipeline of stages: synchronous steps first, then one patch after the other.

Every rank walks the same list of evaluations. The last stage holds one sampler run for each patch and takes its steps;
the first stage gets what the runs ask for next. The others only pass on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..denoising.denoise import Denoising, Tensors
from ..mesh.agreement import of_first_rank
from ..networks.latent_patches import Patch
from ..requests.control import Cancelled, Control, StopVotes
from ..sampling.denoiser import Denoiser
from ..sampling.samplers import Evaluation, Steps, take_steps
from .runner import StageRunner, flatten_rows


@dataclass
class _PatchRun:
    """One patch's sampler run, on every rank; it goes on on the last stage only. `evaluation` is masked."""

    patch: Patch
    run: Steps
    evaluation: Evaluation
    denoiser: Denoiser

    def advance(self, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the outputs of the CFG branches; return what the run asks for next (at its end x), and the denoised
        patch."""
        denoised = self.denoiser.finish(self.evaluation, [output.float() for output in outputs])
        try:
            self.evaluation = self.denoiser.masked(self.run.send(denoised))
        except StopIteration as finished:
            return finished.value, denoised
        return self.denoiser.model_input(self.evaluation), denoised


class PipelineDenoising:
    """A `Sample` request, with its tensors, on one pipeline; `warmup` steps are synchronous."""

    def __init__(self, denoising: Denoising, runner: StageRunner, warmup: int, tensors: Tensors, control: Control):
        self._denoising, self._runner, self._warmup = denoising, runner, warmup
        self._tensors, self._control = tensors, control
        self._x, self._preview = tensors["x"], denoising.request.preview
        self._runs = self._start()
        self._latest = torch.cat([run.denoiser.model_input(run.evaluation) for run in self._runs], dim=2)
        self._denoised = torch.zeros_like(self._latest)
        self._votes = StopVotes(control, runner.mesh.members)

    @torch.no_grad()
    def run(self) -> torch.Tensor | None:
        """Return the finished latent (B, C, ...) float32 on the first stage, None on the others; Cancelled on all ranks
        before the same step."""
        steps, done = len(self._tensors["sigmas"]) - 1, 0
        while done < steps and not self._votes.stop():
            self._evaluate(done)
            if done > 0:
                self._report(done - 1, steps)
            done += 1
        if done > 0 and self._runner.first:
            self._expect_runs()
            self._receive(self._runs)  # what the last stage has sent, also where nobody will compute it
        if done == steps:
            self._report(steps - 1, steps)
        # All ranks end the run here together, finished or cancelled: nothing of it is left under way. After an error
        # nothing is waited for: the others may never come, and the pool ends with its text.
        self._runner.outbox.flush()
        self._votes.close()
        self._runner.finish()
        if done < steps:
            raise Cancelled
        return self._latest.reshape(self._x.shape) if self._runner.first else None

    def _start(self) -> list[_PatchRun]:
        rows = flatten_rows(self._x)
        dims, given = self._x.ndim, self._tensors.items()
        flat = {name: flatten_rows(tensor) if tensor.ndim == dims else tensor for name, tensor in given}
        denoiser = self._denoising.denoiser(_elsewhere, flat)
        runs = []
        for patch in self._runner.patches:
            run = take_steps(self._denoising.sampler, rows[patch.band], self._tensors["sigmas"])
            part = denoiser.part(patch.band)
            runs.append(_PatchRun(patch, run, part.masked(next(run)), part))
        return runs

    def _evaluate(self, index: int) -> None:
        runner = self._runner
        timestep = self._tensors["timesteps"][index].float().expand(self._x.shape[0])
        # The forwards of a step, each with its patch (None: the whole latent) and the runs that it is for.
        turns: list[tuple[Patch | None, list[_PatchRun]]] = [(run.patch, [run]) for run in self._runs]
        if index < self._warmup or len(turns) == 1:
            turns = [(None, self._runs)]
        receives = runner.first and index > 0
        if receives:
            self._expect_runs()
        for patch, _ in turns:
            runner.expect(patch)
        for patch, runs in turns:
            if receives:
                self._receive(runs)
            inputs = self._denoising.model_inputs(self._latest.reshape(self._x.shape), self._tensors)
            outputs = runner.evaluate(inputs, timestep, patch)
            if outputs is not None:
                self._advance(outputs, patch, runs)

    def _advance(self, outputs: list[torch.Tensor], patch: Patch | None, runs: list[_PatchRun]) -> None:
        """On the last stage: step, and send the first stage what comes next, patch by patch."""
        for run in runs:
            own = [output[run.patch.band] for output in outputs] if patch is None else outputs
            following, denoised = run.advance(own)
            message = torch.stack([following, denoised] if self._preview else [following]).flatten()
            if self._denoising.unlike:
                message = of_first_rank(message, self._runner.mesh)
            self._runner.outbox.send(message)

    def _expect_runs(self) -> None:
        parts = 2 if self._preview else 1
        for run in self._runs:
            self._runner.inbox.expect(parts * self._latest[run.patch.band].numel(), torch.float32)

    def _receive(self, runs: Sequence[_PatchRun]) -> None:
        for run in runs:
            band = run.patch.band
            parts = self._runner.inbox.take().view(-1, *self._latest[band].shape)
            self._latest[band] = parts[0]
            if self._preview:
                self._denoised[band] = parts[1]

    def _report(self, index: int, steps: int) -> None:
        """The first stage, which the client listens to, knows a step's denoised latent when the next has begun."""
        preview = self._denoised.reshape(self._x.shape) if self._preview else None
        self._control.progress(index, steps, preview)


def _elsewhere(x: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
    raise AssertionError("a pipeline's denoiser is used by its halves")


def forward_once(runner: StageRunner, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor | None:
    """One exact call of the transformer, all patches at once: for samplers that run in ComfyUI. Of x (B, C, ...) in the
    model's dtype and timestep (B,) float32 the prediction in ComfyUI's layout on the first stage; None on the others.
    """
    runner.expect(None)
    outputs = runner.evaluate([x], timestep, None)
    if outputs is not None:
        runner.outbox.send(outputs[0].contiguous().reshape(-1))
    result = None
    if runner.first:
        shape = torch.Size(runner.output_shape())
        runner.inbox.expect(shape.numel(), x.dtype)
        result = runner.inbox.take().reshape(shape)
    runner.outbox.flush()
    return result
