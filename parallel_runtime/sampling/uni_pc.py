"""UniPC (Zhao et al. 2023), data prediction, order up to 3, one evaluation a step.

Step i predicts x at its sigma from the evaluations before, evaluates there, and corrects x with what it has learnt.
The solver stands on the variance-preserving scale whatever the model, as ComfyUI's does, and ends at END instead of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .steps import Method, Run, Steps

END = 0.001
"""Where a run ends whose last sigma is 0: the log of the signal-to-noise ratio is finite there."""

_MAX_ORDER = 3


@dataclass(frozen=True)
class _Level:
    """A noise level in the solver's terms; all 0-dim float32 on the host, so that the GPU is never waited for.

    Args:
        stretch: x on the exploding scale = x here * stretch.
        signal, deviation: parts of latent and noise in x here.
        log_ratio: log(signal / deviation), the solver's time.
    """

    sigma: torch.Tensor
    stretch: torch.Tensor
    signal: torch.Tensor
    deviation: torch.Tensor
    log_ratio: torch.Tensor


def _level(sigma: torch.Tensor) -> _Level:
    # Through logarithms and back: near END float32 leaves few digits, and ComfyUI's result has the same ones.
    log_signal = 0.5 * torch.log(1 / (sigma * sigma + 1))
    variance = 1.0 - torch.exp(2.0 * log_signal)
    log_ratio = log_signal - 0.5 * torch.log(variance)
    return _Level(sigma, (sigma**2 + 1.0) ** 0.5, torch.exp(log_signal), variance.sqrt(), log_ratio)


@dataclass(frozen=True)
class _Past:
    level: _Level
    denoised: torch.Tensor


@dataclass(frozen=True)
class _Update:
    """One step of order len(past), from past[-1] to `target`; `past` is in the order of time.

    Args:
        linear: x at the target if the denoised latent did not change on the way.
        differences: change of the denoised latent towards each older evaluation, per unit of the step.
        scale: factor on the combined differences.
        matrix, moments: the conditions that their weights fulfil, on the host.
    """

    linear: torch.Tensor
    differences: Sequence[torch.Tensor]
    scale: torch.Tensor
    matrix: torch.Tensor
    moments: torch.Tensor

    def predict(self) -> torch.Tensor:
        """x at the target, from the past alone."""
        count = len(self.differences)
        if count == 0:
            return self.linear
        # One difference: the paper's simpler weight, good to the same order.
        weights = [0.5] if count == 1 else torch.linalg.solve(self.matrix[:-1, :-1], self.moments[:-1]).tolist()
        return self.linear - self.scale * _combine(weights, self.differences)

    def correct(self, change: torch.Tensor) -> torch.Tensor:
        """x at the target, once the change of the denoised latent over the step is known."""
        weights = [0.5] if not self.differences else torch.linalg.solve(self.matrix, self.moments).tolist()
        return self.linear - self.scale * _combine(weights, [*self.differences, change])


def _combine(weights: Sequence[float], terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum((weight * term for weight, term in zip(weights, terms, strict=True)), torch.zeros_like(terms[0]))


def _update(x: torch.Tensor, past: Sequence[_Past], target: _Level, bh2: bool) -> _Update:
    last = past[-1]
    step = target.log_ratio - last.level.log_ratio
    grown = torch.expm1(-step)
    base = grown if bh2 else -step
    reaches = [(older.level.log_ratio - last.level.log_ratio) / step for older in reversed(past[:-1])]
    nodes = torch.stack([*reaches, torch.ones_like(step)])
    moments, term = [], grown / -step - 1
    for order in range(1, len(past) + 1):
        moments.append(term * math.factorial(order) / base)
        term = term / -step - 1 / math.factorial(order + 1)
    differences = [
        (older.denoised - last.denoised) / reach for older, reach in zip(reversed(past[:-1]), reaches, strict=True)
    ]
    linear = target.deviation / last.level.deviation * x - target.signal * grown * last.denoised
    matrix = torch.stack([nodes**power for power in range(len(past))])
    return _Update(linear, differences, target.signal * base, matrix, torch.stack(moments))


def _on_own_scale(x: torch.Tensor, denoised: torch.Tensor, level: _Level) -> torch.Tensor:
    """The denoised latent, brought through the noise as ComfyUI's solver brings it; rounding is then the same."""
    noise = (x * level.stretch - denoised) / level.sigma
    return (x - level.deviation * noise) / level.signal


def _method(bh2: bool, run: Run, x: torch.Tensor) -> Steps:
    sigmas = run.levels.clone()
    if sigmas[-1] == 0:
        sigmas[-1] = END
    levels = [_level(sigma) for sigma in sigmas]
    if run.count == 0:
        return x
    highest = min(_MAX_ORDER, run.count - 1)
    x = x / levels[0].stretch
    denoised = yield run.evaluate(x * levels[0].stretch, 0)
    past = [_Past(levels[0], _on_own_scale(x, denoised, levels[0]))]
    # A run of one step has order 0: ComfyUI evaluates, and takes no step.
    for index in range(1, run.count + 1 if highest else 1):
        order = min(index, highest, run.count + 1 - index)
        update = _update(x, past[-order:], levels[index], bh2)
        x = update.predict()
        if index < run.count:
            denoised = yield run.evaluate(x * levels[index].stretch, index)
            own = _on_own_scale(x, denoised, levels[index])
            x = update.correct(own - past[-1].denoised)
            past = [*past, _Past(levels[index], own)][-_MAX_ORDER:]
    return x / levels[-1].signal


uni_pc: Method = partial(_method, False)
"""With B(h) = h."""

uni_pc_bh2: Method = partial(_method, True)
"""With B(h) = exp(h) - 1."""
