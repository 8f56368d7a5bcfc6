"""The denoising loop of one `Sample` request, run alike on every rank of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import RequestError
from ..sampling.denoiser import FlowDenoiser, Inpaint
from ..sampling.noise import NoiseSource
from ..sampling.samplers import StepState, find_sampler
from .conditioning import Conditioning
from .control import Cancelled, Control
from .predict import Call, Predictor
from .requests import Sample


class Denoising:
    """A loop that is ready to run.

    Args:
        request: what was asked for.
        dtype: the transformer's; the latent itself stays float32, as in ComfyUI.

    Raises:
        RequestError: a sampler that the pool does not have, or branches that guidance cannot combine.
    """

    def __init__(self, request: Sample, dtype: torch.dtype):
        self.request = request
        self.dtype = dtype
        self.sampler = find_sampler(request.sampler)
        if [branch.index for branch in request.branches] not in ([0], [0, 1]):
            raise RequestError(
                "Sampling in the pool takes a positive and at most one negative conditioning.",
                "Use KSampler for this graph.",
            )

    def run(
        self,
        predictor: Predictor,
        branches: Sequence[Conditioning],
        tensors: Mapping[str, torch.Tensor],
        control: Control,
    ) -> torch.Tensor:
        """Return the finished latent (B, C, ...) float32, on the scale of the model.

        Every rank holds the whole latent and takes every step itself, from predictions that are the same bytes on
        all ranks: so the latents stay equal without being exchanged.

        Raises:
            Cancelled: on all ranks before the same step.
        """
        sigmas = tensors["sigmas"]
        total = len(sigmas) - 1

        def predict(x: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
            seen = x.to(self.dtype)
            outputs = predictor([Call(seen, timestep, conditioning) for conditioning in branches])
            return [output.float() for output in outputs]

        def on_step(state: StepState) -> None:
            control.progress(state.index, total, state.denoised if self.request.preview else None)
            if control.all_stop():
                raise Cancelled

        denoise = FlowDenoiser(predict, self.request.cfg, self.request.timestep_multiplier, self._inpaint(tensors))
        return self.sampler(denoise, tensors["x"], sigmas, noise=self._noise(tensors["x"]), on_step=on_step)

    def sit_out(self, sigmas: torch.Tensor, control: Control) -> None:
        """What a rank outside the mesh does meanwhile: it joins the collectives that all ranks of the pool share."""
        for _ in range(len(sigmas) - 1):
            if control.all_stop():
                raise Cancelled

    def _inpaint(self, tensors: Mapping[str, torch.Tensor]) -> Inpaint | None:
        if not self.request.inpaint:
            return None
        return Inpaint(tensors["mask"], tensors["latent_image"], tensors["noise"])

    def _noise(self, x: torch.Tensor) -> NoiseSource | None:
        if not self.sampler.adds_noise:
            return None
        # Drawn on the rank's own GPU where that is of the wanted type, so that no rank reaches for GPU 0.
        same = x.device.type == self.request.noise_device
        return NoiseSource(self.request.seed, x.device if same else self.request.noise_device)
