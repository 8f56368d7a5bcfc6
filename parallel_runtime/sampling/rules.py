"""The methods with one or two evaluations a step, each one position at a time."""

from __future__ import annotations

import torch

from .steps import Run, Step, Steps


def _slope(x: torch.Tensor, denoised: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return (x - denoised) / sigma


def euler(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """First order along the probability-flow ODE (Karras et al. 2022, algorithm 1 without its correction)."""
    return x + _slope(x, denoised, step.sigma) * (step.sigma_next - step.sigma)


def heun(run: Run, x: torch.Tensor) -> Steps:
    """Trapezoid: the slope at both ends, a second evaluation (Karras et al. 2022, algorithm 1); the last is Euler."""
    for index in range(run.count):
        sigma, sigma_next = run.sigmas[index], run.sigmas[index + 1]
        denoised = yield run.evaluate(x, index)
        slope = _slope(x, denoised, sigma)
        predicted = x + slope * (sigma_next - sigma)
        if run.ends_clean(index):
            return predicted
        denoised_next = yield run.evaluate(predicted, index, index + 1)
        x = x + (slope + _slope(predicted, denoised_next, sigma_next)) / 2 * (sigma_next - sigma)
    return x


def dpmpp_2m(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, in the log of sigma; first order at the first step and on the way to 0."""
    log_sigma, log_next = step.sigma.log(), step.sigma_next.log()
    towards = denoised
    if step.previous is not None and not step.ends_clean:
        previous_sigma, previous_denoised = step.previous
        reach = (previous_sigma.log() - log_sigma) / (log_sigma - log_next)
        weight = 1 / (2 * reach)
        towards = (1 + weight) * denoised - weight * previous_denoised
    # exp(log) and expm1 rather than sigma_next / sigma: the last bit is then ComfyUI's as well.
    return log_next.exp() / log_sigma.exp() * x - (log_next - log_sigma).expm1() * towards


def euler_ancestral(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """Euler to below sigma_next, then fresh noise up to it (eta 1); the two noise paths need different amounts."""
    if step.ends_clean:
        return denoised
    return (_ancestral_flow if step.run.prediction.is_flow else _ancestral_exploding)(step, x, denoised)


def _ancestral_flow(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """Rectified-flow form: the part of the signal is 1 - sigma and the part of the noise sigma.

    So a point at `down` becomes one at sigma_next by the ratio of the signals, and by the noise that is then missing
    in quadrature.
    """
    down = step.sigma_next * (1 + (step.sigma_next / step.sigma - 1))
    kept = down / step.sigma
    signal_next, signal_down = 1 - step.sigma_next, 1 - down
    missing = (step.sigma_next**2 - down**2 * signal_next**2 / signal_down**2) ** 0.5
    at_down = kept * x + (1 - kept) * denoised
    return signal_next / signal_down * at_down + step.run.draw_noise(x) * missing


def _ancestral_exploding(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """The posterior of the Markov chain between two noise levels: variance `up`² is drawn, `down`² stays."""
    levels = step.run.levels
    if _down_and_up(levels[step.index], levels[step.index + 1])[0] == 0:
        # A leap over more than a factor of 4000, where float32 leaves nothing below; ComfyUI draws no noise then.
        return denoised
    down, up = _down_and_up(step.sigma, step.sigma_next)
    return x + _slope(x, denoised, step.sigma) * (down - step.sigma) + step.run.draw_noise(x) * up


def _down_and_up(sigma: torch.Tensor, sigma_next: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = (sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2) ** 0.5
    up = torch.minimum(sigma_next, drawn)
    return (sigma_next**2 - up**2) ** 0.5, up


def ddpm(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """One step of the trained Markov chain with its posterior variance (Ho et al. 2020, equations 7 and 11).

    `kept` is the product of the chain's alphas up to a level, on the variance-preserving scale x / sqrt(1 + sigma²).
    """
    noise_part = _slope(x, denoised, step.sigma)
    kept, kept_next = 1 / (step.sigma**2 + 1), 1 / (step.sigma_next**2 + 1)
    alpha = kept / kept_next
    preserving = x / (1.0 + step.sigma**2.0).sqrt()
    mean = (1.0 / alpha).sqrt() * (preserving - (1 - alpha) * noise_part / (1 - kept).sqrt())
    if step.ends_clean:
        return mean
    deviation = ((1 - alpha) * (1.0 - kept_next) / (1.0 - kept)).sqrt()
    return (mean + deviation * step.run.draw_noise(x)) * (1.0 + step.sigma_next**2.0).sqrt()


def lcm(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """Multistep consistency sampling (Luo et al. 2023): take the denoised latent, noise it afresh."""
    if step.ends_clean:
        return denoised
    return step.run.prediction.add_noise(denoised, step.run.draw_noise(x), step.sigma_next)
