"""What a loop asks for is used, or refused before it starts: its inputs and guidance, and the model's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.denoising.denoise import INPAINT
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.opened import DiffusersFamily
from parallel_runtime.errors import RequestError
from parallel_runtime.networks.diffusers.wan import WAN
from parallel_runtime.requests.conditioning import Conditioning, refer
from parallel_runtime.requests.requests import Load, Request, Sample, concat_name, share_name
from tests.tiny_flux import tiny_config, write_diffusers_folder
from tests.tiny_wan import image_config
from tests.tiny_wan import tiny_config as wan_config

X = (2, 16, 6, 4)
DRAWN = torch.Generator().manual_seed(0)
TEXTS = [
    {"context": torch.randn(2, 5, 64, generator=DRAWN), "y": torch.randn(2, 32, generator=DRAWN)} for _ in range(2)
]
BRANCHES = tuple(refer(branch, text, branch)[0] for branch, text in enumerate(TEXTS))
REQUEST = Sample("tiny", "euler", BRANCHES, cfg=3.0, inpaint=True, concat=True)


class Quiet:
    """Control of a run that nobody watches."""

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """Nobody to tell."""

    def before_compiling(self) -> None:
        pass

    def check_cancel(self) -> None:
        """Never cancelled."""

    def loading(self, done: int, total: int) -> None:
        """Nobody to tell."""

    def vote_stop(self, members: Any) -> Callable[[], bool]:
        """Alone."""
        return lambda: False

    def all_stop(self, members: Any) -> bool:
        """Never."""
        return False


def sample_tensors() -> dict[str, torch.Tensor]:
    """All that REQUEST asks for."""
    generator = torch.Generator().manual_seed(0)
    texts = {name: each for branch, text in enumerate(TEXTS) for name, each in refer(branch, text)[1].items()}
    latents = {name: torch.randn(X, generator=generator) for name in ("x", "latent_image", "noise")}
    fixed = {concat_name(branch): torch.randn(X, generator=generator) for branch in (0, 1)}
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    return {**texts, **latents, **fixed, "mask": torch.ones(X), "sigmas": sigmas, "timesteps": sigmas}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    """One rank with a FLUX that takes fixed channels."""
    path = write_diffusers_folder(tmp_path_factory.mktemp("models") / "canny", tiny_config(in_channels=128))
    engine = Engine(torch.device("cpu"), 0, 1)
    work(engine, Load("tiny", str(path), "float32", ParallelConfig(devices="cpu:1").to_mapping(), ranks=1), {})
    return engine


def prepare(engine: Engine, request: Request, tensors: Mapping[str, torch.Tensor]) -> Any:
    return engine.prepare(request, {name: tensor.to("meta") for name, tensor in tensors.items()}, Quiet())


@torch.no_grad()
def work(engine: Engine, request: Request, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return prepare(engine, request, tensors).run(tensors, Quiet())[1]


@pytest.mark.slow
def test_a_run_reads_every_input_it_asks_for_and_no_other(engine):
    tensors = sample_tensors()
    latent = work(engine, REQUEST, tensors)["latent"]
    assert torch.isfinite(latent).all()
    for name in ("concat.0", "concat.1", "mask", "timesteps"):
        changed = work(engine, REQUEST, {**tensors, name: tensors[name] * 0.5})["latent"]
        assert (changed - latent).abs().max() > 1e-4, name
    plain = msgspec.structs.replace(REQUEST, inpaint=False)
    left = {name: tensor for name, tensor in tensors.items() if name not in INPAINT}
    assert torch.equal(work(engine, plain, left)["latent"], work(engine, plain, tensors)["latent"])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"mask": None}, "asks for mask, which did not come"),
        ({"concat.1": None}, r"asks for concat\.1, which did not come"),
        ({"timesteps": None, "noise": None}, "asks for timesteps, noise, which did not come"),
        ({"mask": (2, 1, 6, 4)}, r"a noise mask of shape \(2, 1, 6, 4\), .* latent of \(2, 16, 6, 4\)"),
        ({"concat.0": (2, 16, 6, 5)}, r"fixed channels of shape \(2, 16, 6, 5\)"),
        ({"concat.1": (2, 8, 6, 4)}, "hidden_states of width 128 .* got 96"),
        ({"timesteps": (2,)}, r"steps of shape \(3,\), \(2,\)"),
        ({"sigmas": (1,), "timesteps": (1,)}, r"steps of shape \(1,\), \(1,\)"),
    ],
)
def test_what_a_part_lacks_is_refused_before_the_loop_starts(engine, changed, says):
    tensors = sample_tensors() | {name: torch.zeros(shape) for name, shape in changed.items() if shape}
    tensors = {name: tensor for name, tensor in tensors.items() if changed.get(name, True)}
    with pytest.raises(RequestError, match=says):
        prepare(engine, REQUEST, tensors)


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        ({"sampler": "heun"}, "do not know 'heun'; they know euler, dpmpp_2m"),
        ({"prediction": "edm"}, "do not know 'edm'; they know flow, eps, v_prediction"),
        ({"own_timesteps": ((0, "guide", 0.0),)}, f"asks for {share_name(0, 'guide')}, which did not come"),
        ({"own_timesteps": ((0, "shares", 0.0),)}, r"own timesteps of shape \(3,\)"),
    ],
)
def test_a_loop_that_ranks_cannot_run_is_refused_before_it_starts(engine, asks, says):
    tensors = sample_tensors() | {share_name(0, "shares"): torch.zeros(3)}  # of three pictures, where there are two
    with pytest.raises(RequestError, match=says):
        prepare(engine, msgspec.structs.replace(REQUEST, **asks), tensors)


def test_guidance_that_cannot_be_is_refused_before_the_loop_starts(engine):
    with pytest.raises(RequestError, match="CFG 3 needs a negative conditioning"):
        prepare(engine, msgspec.structs.replace(REQUEST, branches=BRANCHES[:1]), sample_tensors())


def test_a_loop_on_a_model_that_is_not_resident_is_refused(engine):
    with pytest.raises(RequestError, match="not loaded"):
        prepare(engine, msgspec.structs.replace(REQUEST, model="another"), sample_tensors())


def test_a_parameter_whose_part_the_checkpoint_lacks_is_refused_with_both_names():
    given = {"context": torch.zeros(1, 512, wan_config()["text_dim"]), "clip_fea": torch.zeros(1, 257, 1280)}

    def check(config: dict[str, Any], **changes: Any) -> None:
        x = torch.zeros(1, config["in_channels"], 3, 4, 4, device="meta")
        DiffusersFamily(WAN, config).check(Conditioning({**given, **changes}), x)

    check(image_config())
    check(wan_config(), clip_fea=None)
    with pytest.raises(RequestError, match="holds clip_fea, and this Wan checkpoint has no image embedder"):
        check(wan_config())
