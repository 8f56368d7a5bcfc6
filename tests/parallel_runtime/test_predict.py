"""Calls of the CFG branches are joined, shared out and taken apart with everything that belongs to each picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor, merge, own_calls, select
from parallel_runtime.mesh.mesh import Layout, single_rank_mesh
from parallel_runtime.networks.diffusers.pixart import PIXART
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.patches import CARRIED, PATCHES, Patch
from tests.ranks import run_ranks
from tests.tiny_pixart import make_call, tiny_config

ALPHA = tiny_config(use_additional_conditions=True)


def branch(seed: int, height: float, batch: int, text: int = 5) -> Call:
    """A branch whose texts, sizes and aspect ratios are its own, and differ from picture to picture."""
    call = make_call(seed, (6, 8), batch, text)
    sizes = torch.tensor([[height + number, 768.0] for number in range(batch)])
    given = {"context": call["context"], "c_size": sizes, "c_ar": sizes[:, :1] / sizes[:, 1:]}
    return Call(call["x"], call["timestep"], Conditioning(given))


def arguments(call: Call) -> dict[str, torch.Tensor]:
    """What the transformer would get, flat."""
    given = PIXART.to_transformer(call.x, call.timestep, config=ALPHA, **call.conditioning.arguments)
    return {**given.pop("added_cond_kwargs"), **given}


@pytest.mark.parametrize("batch", [1, 2])
def test_every_share_of_joined_branches_has_its_own_text_resolution_and_aspect_ratio(batch):
    branches = [branch(1, 512.0, batch), branch(2, 1024.0, batch)]
    (joined,) = merge(branches)
    alone = [{name: value[row] for name, value in arguments(b).items()} for b in branches for row in range(batch)]
    for low in range(2 * batch):
        for high in range(low + 1, 2 * batch + 1):
            share = arguments(select(joined, low, high))
            assert share.keys() == alone[0].keys()
            for name, value in share.items():
                assert torch.equal(value, torch.stack([row[name] for row in alone[low:high]])), (name, low, high)


def test_a_conditioning_for_all_pictures_is_spread_over_them_before_it_is_joined():
    both = branch(1, 512.0, 2)
    one = Call(both.x, both.timestep, branch(2, 1024.0, 1).conditioning)
    (joined,) = merge([both, one])
    assert arguments(select(joined, 3, 4))["resolution"].tolist() == [[1024.0, 768.0]]
    assert torch.equal(
        arguments(select(joined, 2, 4))["encoder_hidden_states"],
        one.conditioning.arguments["context"].expand(2, -1, -1),
    )


def test_branches_of_unequal_texts_stay_two_calls():
    unequal = [branch(1, 512.0, 1), branch(2, 512.0, 1, text=4)]
    assert merge(unequal) == unequal


def test_calls_whose_shared_arguments_differ_are_not_joined():
    def call(mask: torch.Tensor) -> Call:
        arguments = {"context": torch.ones(1, 3, 4), "mask": mask}
        return Call(torch.zeros(1, 4), torch.zeros(1), Conditioning(arguments, frozenset({"mask"})))

    assert len(merge([call(torch.ones(2)), call(torch.zeros(2))])) == 2
    (joined,) = merge([call(torch.ones(2)), call(torch.ones(2))])
    assert joined.conditioning.arguments["mask"].shape == (2,)
    assert joined.conditioning.arguments["context"].shape == (2, 3, 4)


def of_comfyui(branch: int, **options: object) -> Call:
    """What a branch of ComfyUI's own network is called with: its options say which branch it is."""
    references = [torch.full((2, 3), float(branch)), torch.full((2, 5), float(branch))]
    arguments = {
        "context": torch.full((1, 3, 4), float(branch)),
        "ref_latents": references,
        "transformer_options": {"cond_or_uncond": [branch], **options},
    }
    return Call(torch.zeros(2, 4), torch.zeros(2), Conditioning(arguments, frozenset({"transformer_options"})))


def network_of(predict: Callable[..., torch.Tensor], rows_together: bool = False, apart: bool = False) -> Any:
    """What a `Predictor` asks of a network."""
    return SimpleNamespace(
        rows_together=rows_together,
        predict=predict,
        set_mesh=lambda mesh: None,
        rows_go_apart=lambda rows, begins: apart,
    )


def test_branches_of_comfyuis_own_network_go_through_one_forward_as_with_ksampler():
    seen = []

    def predict(x: torch.Tensor, timestep: torch.Tensor, arguments: dict) -> torch.Tensor:
        seen.append(
            (x.shape[0], arguments["transformer_options"]["cond_or_uncond"], arguments["context"][:, 0, 0].tolist())
        )
        assert [each[:, 0].tolist() for each in arguments["ref_latents"]] == [
            arguments["context"][:, 0, 0].tolist()
        ] * 2
        return x + arguments["context"][:, 0]

    network = network_of(predict)
    calls = [of_comfyui(0, rope=[1.0]), of_comfyui(1, rope=[1.0])]
    one, other = Predictor(network, single_rank_mesh())(calls)
    assert seen == [(4, [1, 0], [1.0, 1.0, 0.0, 0.0])]
    assert one.unique().tolist() == [0.0]
    assert other.unique().tolist() == [1.0]


def test_rows_that_go_apart_go_one_by_one_each_with_what_is_its_own():
    seen = []

    def predict(x: torch.Tensor, timestep: torch.Tensor, arguments: dict) -> torch.Tensor:
        branch = arguments["transformer_options"]["cond_or_uncond"]
        seen.append((x[:, 0].tolist(), timestep.tolist(), branch, arguments["context"][:, 0, 0].tolist()))
        return x + 10 * arguments["context"][:, 0] + timestep[:, None]

    rows = torch.arange(2.0)
    calls = [replace(of_comfyui(branch), x=rows[:, None].expand(2, 4), timestep=rows / 2) for branch in range(2)]
    together, apart = (Predictor(network_of(predict, apart=each), single_rank_mesh())(calls) for each in (False, True))
    assert [len(each[0]) for each in seen] == [4, 1, 1, 1, 1]
    assert seen[1:] == [
        ([0.0], [0.0], [1], [1.0]), ([1.0], [0.5], [1], [1.0]), ([0.0], [0.0], [0], [0.0]), ([1.0], [0.5], [0], [0.0]),
    ]  # fmt: skip
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)


def test_frames_that_attend_to_one_another_stay_together_where_rows_go_apart():
    seen = []

    def predict(x: torch.Tensor, timestep: torch.Tensor, arguments: dict) -> torch.Tensor:
        seen.append(x.shape[0])
        return x

    arguments = {"context": torch.ones(8, 1, 1), "num_video_frames": 4}
    call = Call(torch.zeros(8, 2), torch.zeros(8), Conditioning(arguments))
    Predictor(network_of(predict, apart=True), single_rank_mesh())([call])
    assert seen == [4, 4]


@pytest.mark.parametrize(
    ("first", "second"), [({"scale": 1.0}, {"scale": 2.0}), ({"patch": object()}, {"patch": object()}), ({"a": 1}, {})]
)
def test_branches_with_options_of_their_own_stay_two_calls(first, second):
    calls = [of_comfyui(0, **first), of_comfyui(1, **second)]
    assert merge(calls) == calls


def test_branches_that_comfyui_had_in_two_calls_stay_two_calls():
    calls = [of_comfyui(0), of_comfyui(1)]
    assert len(own_calls(calls, single_rank_mesh())) == 1
    assert own_calls(calls, single_rank_mesh(), joined=False) == calls


@pytest.mark.parametrize(("joined", "wanted"), [(True, [4]), (False, [2, 2])])
def test_rows_that_depend_on_one_another_are_in_one_call_where_comfyui_has_them_there_and_never_cut(joined, wanted):
    seen = []

    def predict(x: torch.Tensor, timestep: torch.Tensor, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(x.shape[0])
        return x + 1

    network = network_of(predict, rows_together=True)
    calls = [
        Call(torch.full((2, 4), float(row)), torch.zeros(2), Conditioning({"context": torch.ones(2, 1, 1)}))
        for row in range(2)
    ]
    outputs = Predictor(network, single_rank_mesh(), joined)(calls)
    assert seen == wanted
    assert [output.tolist() for output in outputs] == [[[row + 1.0] * 4] * 2 for row in range(2)]


def test_branches_with_the_same_function_inside_of_the_network_are_one_call():
    def patched(index: int, scale: float) -> Call:
        patch = Patch("module:function", 0, values={"scale": scale, "of": torch.ones(2)})
        return of_comfyui(index, **{CARRIED: {PATCHES: {"attn1_patch": [patch]}}})

    assert len(merge([patched(0, 1.0), patched(1, 1.0)])) == 1
    assert len(merge([patched(0, 1.0), patched(1, 2.0)])) == 2


@pytest.mark.parametrize(("ranks", "wanted"), [(2, [4, 4]), (3, [4, 4, 0])])
def test_the_frames_of_a_video_stay_on_one_rank(ranks, wanted):
    """Stable Video Diffusion's frames are rows of the batch that attend to one another."""
    arguments = {"context": torch.ones(4, 1, 1), "num_video_frames": 4}
    calls = [Call(torch.zeros(4, 2), torch.zeros(4), Conditioning(arguments)) for _ in range(2)]
    plan = ParallelPlan(data=ranks)
    layouts = [Layout(plan, rank, {"data": rank, "cfg": 0}) for rank in range(ranks)]
    found = [own_calls(calls, each) for each in layouts]
    assert [sum(call.batch for call in own) for own in found] == wanted


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_rows_gather_in_the_type_that_the_network_gives(ranks):
    for found in run_ranks(ranks, "tests.parallel_runtime.predict_run:predict", timeout=60):
        assert len(found) == 12
        assert not [case for case, right in found.items() if not right]


def test_what_one_rank_fails_at_is_known_to_all_and_none_waits_for_it():
    good = "[2.0, 2.0]"
    assert run_ranks(2, "tests.parallel_runtime.predict_run:predict_what_one_fails_at", timeout=60) == [
        {"first": "ValueError", "second": good},  # of joined branches the last is the first rank's
        {"first": "PeerFailedError", "second": good},
    ]
