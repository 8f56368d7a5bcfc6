"""PipeFusion's schedule in one process, on diffusers' own transformer: what any number of stages has to give.

A patch attends to keys and values that are fresh up to itself and a step old behind it. How many stages share the
blocks does not matter to the numbers, so the emulator has none, and no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.sampling.samplers import SAMPLERS, take_steps


class _Store:
    """Keys and values per layer, text rows first; replaces diffusers' attention while it is installed."""

    def __init__(self) -> None:
        self.layers: list[list[torch.Tensor]] = []
        self.text = 0
        self.begin(None, True)

    def begin(self, tokens: tuple[int, int] | None, with_text: bool) -> None:
        self.layer, self.tokens, self.with_text = 0, tokens, with_text

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
        if self.tokens is None:
            kept = [key.clone(), value.clone()]
            self.layers[self.layer : self.layer + 1] = [kept]
        else:
            kept = self.layers[self.layer]
            text = self.text if self.with_text else 0
            for whole, fresh in zip(kept, (key, value), strict=True):
                whole[:, :text] = fresh[:, :text]
                whole[:, self.text + self.tokens[0] : self.text + self.tokens[1]] = fresh[:, text:]
        self.layer += 1
        moved = (tensor.transpose(1, 2) for tensor in (query, *kept))
        return F.scaled_dot_product_attention(*moved).transpose(1, 2)


@torch.no_grad()
def emulate(
    monkeypatch: Any,
    transformer: Any,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    contexts: Sequence[torch.Tensor],
    extras: Sequence[dict[str, Any]],
    *,
    cfg: float,
    sampler: str,
    patches: int,
    warmup: int,
) -> torch.Tensor:
    """Return the finished latent of a FLUX run; see `Sample` for the arguments. x is (B, C, H, W), H even."""
    from diffusers.models.transformers import transformer_flux

    stores = [_Store() for _ in contexts]
    current: list[_Store] = []
    monkeypatch.setattr(
        transformer_flux,
        "dispatch_attention_fn",
        lambda query, key, value, **given: current[0].attend(query, key, value, **given),
    )
    height, columns = x.shape[2] // 2, -(-x.shape[3] // 2)
    rows = [height // patches + (patch < height % patches) for patch in range(patches)]
    cuts = [sum(rows[:patch]) for patch in range(patches + 1)]
    bands = [(slice(None), slice(None), slice(2 * a, 2 * b)) for a, b in pairwise(cuts)]
    runs = [take_steps(SAMPLERS[sampler], x[band], sigmas) for band in bands]
    wanted = [next(run) for run in runs]
    finished: list[torch.Tensor] = []

    def predict(timestep: torch.Tensor, patch: int | None) -> list[torch.Tensor]:
        whole = torch.cat([evaluation.x for evaluation in wanted], dim=2).to(transformer.dtype)
        outputs = []
        for store, context, extra in zip(stores, contexts, extras, strict=True):
            current[:] = [store]
            store.text = context.shape[1]
            arguments = FLUX.to_transformer(whole, timestep, context.to(transformer.dtype), transformer.config, **extra)
            tokens = None if patch is None else (cuts[patch] * columns, cuts[patch + 1] * columns)
            store.begin(tokens, patch in (None, 0))
            if tokens is not None:
                arguments["hidden_states"] = arguments["hidden_states"][:, slice(*tokens)]
                arguments["img_ids"] = arguments["img_ids"][slice(*tokens)]
                if patch:
                    arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"][:, :0]
                    arguments["txt_ids"] = arguments["txt_ids"][:0]
            output = transformer(**arguments, return_dict=False)[0]
            part = whole if patch is None else whole[bands[patch]]
            outputs.append(FLUX.from_transformer(output, part).float())
        return outputs

    def advance(patch: int, outputs: list[torch.Tensor]) -> None:
        evaluation = wanted[patch]
        denoised, *uncond = [evaluation.x - out * evaluation.sigma for out in outputs]
        if uncond:
            denoised = uncond[0] + (denoised - uncond[0]) * cfg
        try:
            wanted[patch] = runs[patch].send(denoised)
        except StopIteration as end:
            finished.append(end.value)

    while not finished:
        evaluation = wanted[0]
        timestep = evaluation.sigma.expand(x.shape[0])
        if evaluation.index < warmup or patches == 1:
            outputs = predict(timestep, None)
            for patch, band in enumerate(bands):
                advance(patch, [output[band] for output in outputs])
        else:
            for patch in range(patches):
                advance(patch, predict(timestep, patch))
    return torch.cat(finished, dim=2)
