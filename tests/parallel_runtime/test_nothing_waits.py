"""Nothing in a step makes the host wait for the GPU. Tensors on the meta device stand for those on it.

Of those nothing can be read; what is brought there out of the CPU's memory, which waits as well, is found by watching.
What a transformer does inside of its forward is not watched: a CUDA graph could not be recorded if it waited.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from parallel_runtime.denoising.predict import Call, own_calls
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.pixart import PIXART
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.sampling.denoiser import PREDICTIONS, Denoiser, Inpaint
from parallel_runtime.sampling.samplers import SAMPLERS, take_steps
from tests import tiny_flux, tiny_pixart, tiny_sdxl
from tests.families import STAGED
from tests.tiny_model import find_by_name

META = torch.device("meta")


class Waited(Exception):
    """A copy from the CPU to the device."""


class NothingWaits(TorchFunctionMode):
    """Raises `Waited`. Numbers, also in tensors without dims, travel with a kernel's launch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.device != META:
            return result
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        copies = func in (torch.Tensor.to, torch.Tensor.copy_)
        from_cpu = [tensor for tensor in given if tensor.device != META and (tensor.ndim or copies)]
        if from_cpu or func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            raise Waited(func)
        return result


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1.0], device=META),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.zeros(3).to(META),
        lambda x: torch.tensor(3.0).to(x),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x[torch.tensor([0])],
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0] == 0),
        lambda x: x[x > 0],
    ],
)
def test_what_waits_is_found(wait):
    with NothingWaits(), pytest.raises((Waited, NotImplementedError, RuntimeError)):
        wait(torch.zeros(3, device=META))


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_no_sampler_waits_in_its_steps(sampler, prediction):
    sigmas = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
    x = torch.zeros(2, 4, 6, 6, device=META)
    inpaint = Inpaint(*(torch.zeros_like(x) for _ in range(3)))
    outputs = [torch.zeros_like(x, dtype=torch.bfloat16) for _ in range(2)]
    denoiser = Denoiser(lambda x, timestep: outputs, prediction, sigmas.to(META), 3.0, inpaint)
    run = take_steps(sampler, x, sigmas)
    evaluation, steps = next(run), 0  # here the host reads the sigmas
    with NothingWaits(), contextlib.suppress(StopIteration):
        while True:
            steps += 1
            evaluation = run.send(denoiser(evaluation))
    assert steps == len(sigmas) - 1


def calls() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Spec, config and call of every family."""
    given = {name: (find_by_name(family.spec), family.config, family.call) for name, family in STAGED.items()}
    flux = {
        "x": torch.zeros(1, 16, 5, 6),
        "context": torch.zeros(1, 3, 64),
        "y": torch.zeros(1, 32),
        "ref_latents": [torch.zeros(1, 16, 4, 4)],
    }
    alpha = tiny_pixart.tiny_config(use_additional_conditions=True)
    return {
        **given,
        "FLUX.1": (find_by_name("flux"), tiny_flux.tiny_config(guidance_embeds=True), flux),
        "PixArt-α": (PIXART, alpha, tiny_pixart.make_call(1, (6, 8))),
        "SDXL": (find_by_name("sdxl"), tiny_sdxl.tiny_config(), tiny_sdxl.make_call(1, (8, 8))),
    }


@pytest.mark.parametrize("family", calls())
def test_no_adapter_waits_in_its_calls(family):
    spec, config, call = calls()[family]
    on_device = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), call)
    x, timestep = on_device.pop("x"), on_device.pop("timestep", torch.zeros(1, device=META))
    branch = Call(x, timestep[:1].expand(x.shape[0]), Conditioning(on_device))
    with NothingWaits():
        for own in own_calls([branch, branch], single_rank_mesh()):
            text = own.conditioning
            arguments = spec.to_transformer(own.x, own.timestep, config=config, **text.arguments)
            assert all(leaf.device == META for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
