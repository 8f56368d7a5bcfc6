"""What is transportable to the pool is told apart from what is not, and that is named."""

from __future__ import annotations

import inspect

import pytest
import torch

from nodes.transformer_call import TransformerCall, read_call, split_branches, split_extra_channels
from nodes.transportable import (
    call_obstacles,
    condition_obstacles,
    loop_obstacles,
    option_obstacles,
    plain_options,
    weight_obstacles,
)
from parallel_runtime.requests.conditioning import Shared

LATENT = (2, 4, 6, 8)
CONDS = ("positive", "negative")
SIGMA = torch.full((2,), 0.75)
NO_CHANGES = {
    "weight_wrappers": {},
    "object_patches": {"model_sampling": object()},
    "injections": {},
    "wrappers": {"outer_sample": {"a": [print]}},
}


def make_call(branches=(0,), channels=4, size=(6, 8), timestep=0.75, **conditioning) -> TransformerCall:
    rows = 2 * len(branches)
    return TransformerCall(
        x=torch.zeros(rows, channels, *size),
        timestep=torch.full((rows,), timestep),
        conditioning={"context": torch.randn(rows, 3, 5), **conditioning},
        control=None,
        options={"cond_or_uncond": list(branches)},
    )


def test_a_plain_graph_has_no_obstacles():
    options = {
        "cond_or_uncond": [0],
        "sigmas": SIGMA,
        "wrappers": {"diffusion_model": {}},
        "patches": {},
        "rope_options": {"scale_x": 1.0, "shift_y": 0.0},
    }
    assert option_obstacles(options) == []
    assert loop_obstacles({"transformer_options": options, "disable_cfg1_optimization": True}) == []
    assert condition_obstacles({"positive": [{"strength": 1.0, "pooled_output": 1}], "negative": [{}]}) == []
    assert weight_obstacles(**NO_CHANGES) == []


@pytest.mark.parametrize(
    "options",
    [
        {"patches": {"attn1_patch": [print]}},
        {"patches_replace": {"dit": {("double_block", 0): print}}},
        {"rope_options": {"scale_x": 2.0}},
    ],
)
def test_what_acts_inside_of_the_transformer_travels_with_a_loop_as_with_a_step(options):
    assert option_obstacles(options) == []
    assert loop_obstacles({"transformer_options": options}) == []


def test_another_attention_function_is_named():
    options = {"optimized_attention_override": print}
    assert "attention function" in " ".join(option_obstacles(options))
    assert "attention function" in " ".join(loop_obstacles({"transformer_options": options}))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"weight_wrappers": {"w": [print]}}, "wrapped"),
        ({"object_patches": {"diffusion_model.img_in": 1}}, r"diffusion_model.img_in"),
        ({"object_patches": {"manual_cast_dtype": 1}}, "weight_dtype"),
        ({"injections": {"animate": [1]}}, "animate"),
        ({"wrappers": {"apply_model": {"torch.compile": [print]}}}, "Parallel Config"),
    ],
)
def test_changes_of_the_weights_are_named(changes, name):
    assert name in " ".join(weight_obstacles(**{**NO_CHANGES, **changes}))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sampler_cfg_function": print}, "custom CFG"),
        ({"sampler_post_cfg_function": [print]}, "after CFG"),
        ({"model_function_wrapper": print}, "wrapper around"),
        ({"invented_by_a_node": 3}, "invented_by_a_node"),
        ({"transformer_options": {"wrappers": {"diffusion_model": {"EasyCache": [print]}}}}, "EasyCache"),
        ({"transformer_options": {"callbacks": {"on_prepare_state": {None: [print]}}}}, "callback"),
        ({"transformer_options": {"invented": print}}, "invented"),
    ],
)
def test_what_acts_between_steps_is_named_and_the_unknown_counts(options, name):
    assert name in " ".join(loop_obstacles(options))


@pytest.mark.parametrize(
    ("conds", "name"),
    [
        ({"positive": [{"area": (1, 1, 0, 0)}]}, "an area on the positive"),
        ({"negative": [{"mask": torch.ones(1, 2, 2)}]}, "a mask on the negative"),
        ({"positive": [{"strength": 0.5}]}, "a strength"),
        ({"positive": [{"timestep_start": 0.9}]}, "timestep range"),
        ({"positive": [{"control": object()}]}, "ControlNet"),
        ({"positive": [{}, {}]}, "2 positive"),
    ],
)
def test_conditionings_that_are_more_than_a_text_are_named(conds, name):
    assert name in " ".join(condition_obstacles(conds))


@pytest.mark.parametrize(
    "calls",
    [
        [make_call((0,))],
        [make_call((0,)), make_call((1,))],
        [make_call((1, 0), guidance=torch.ones(4), method="index")],
    ],
)
def test_plain_evaluations_have_no_obstacles(calls):
    cfg = 1.0 if len(calls) == 1 and calls[0].cond_or_uncond == [0] else 4.0
    assert call_obstacles(calls, LATENT, CONDS, cfg) == []


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ([make_call(channels=2)], "shape"),
        ([make_call((0,), channels=8), make_call((1,))], "for one conditioning only"),
        ([make_call(size=(6, 4))], "shape"),
        ([make_call((0,)), make_call((0,))], "2 positive"),
        ([make_call((1,))], "no positive"),
        ([make_call((1, 0), y=torch.ones(1, 3))], "shared input y"),
        ([make_call((1, 0), ref_latents=[torch.ones(1, 3)])], "shared input ref_latents"),
    ],
)
def test_evaluations_that_are_not_plain_are_named(calls, name):
    assert name in " ".join(call_obstacles(calls, LATENT, CONDS, 1.0))


def test_guidance_without_a_negative_is_named():
    assert "no negative" in " ".join(call_obstacles([make_call()], LATENT, CONDS, 4.0))
    assert call_obstacles([make_call((1, 2))], LATENT, ("negative", "middle", "positive"), None) == []


def test_extra_channels_of_batched_branches_are_taken_apart_in_the_order_of_their_index():
    calls = [make_call((1, 0), channels=6)]
    calls[0].x[:2, 4:] = torch.tensor([7.0, 8.0]).view(2, 1, 1)
    positive, negative = split_extra_channels(calls, 4).values()
    assert positive.shape == negative.shape == (2, 2, 6, 8)
    assert positive.abs().max() == 0
    assert negative.amin((0, 2, 3)).tolist() == negative.amax((0, 2, 3)).tolist() == [7.0, 8.0]
    assert call_obstacles(calls, LATENT, CONDS, 4.0) == []


def test_a_plain_latent_has_no_extra_channels():
    assert split_extra_channels([make_call((1, 0))], 4) == {}


def test_batched_branches_are_taken_apart_in_the_order_of_their_index():
    call = make_call((1, 0), ref_latents=[torch.arange(4.0)], method="index")
    (first, positive), (second, negative) = split_branches([call]).items()
    assert (first, second) == (0, 1)
    assert torch.equal(positive["context"], call.conditioning["context"][2:])
    assert torch.equal(negative["context"], call.conditioning["context"][:2])
    assert positive["ref_latents"][0].tolist() == [2.0, 3.0]
    assert positive["method"] == negative["method"] == "index"


def test_arguments_are_named_by_the_familys_own_signature():
    def flux(x, timestep, context, y=None, guidance=None, control=None, transformer_options=None, **kwargs): ...

    def other(x, t, cap_feats, num_tokens, transformer_options=None, **kwargs): ...

    x, t, context = torch.zeros(1), torch.ones(1), torch.ones(2)
    call = read_call(inspect.signature(flux), (x, t, context, None, 3.5, "net", {"sigmas": 1}), {"ref_latents": [x]})
    assert (call.x is x, call.timestep is t, call.control, call.options) == (True, True, "net", {"sigmas": 1})
    assert dict(call.conditioning) == {"context": context, "guidance": 3.5, "ref_latents": [x]}
    call = read_call(inspect.signature(other), (x, t), {"cap_feats": context, "num_tokens": 5, "control": None})
    assert dict(call.conditioning) == {"cap_feats": context, "num_tokens": 5}
    assert call.cond_or_uncond == (0,)


def test_comfyuis_own_network_gets_the_options_that_are_data():
    options = {
        "cond_or_uncond": [0, 1], "rope_options": {"scale_x": 2.0}, "run_vx": True, "uuids": [1], "sigmas": SIGMA,
        "wrappers": {"apply_model": {"a": [print]}}, "patches": {}, "empty": {},
        "a2v_cross_attn": False, "stg_self_attn_blocks": frozenset([1]), "audio_embeds": SIGMA, "easycache": object(),
    }  # fmt: skip
    assert option_obstacles(options) == []
    assert plain_options(options) == {
        "cond_or_uncond": [0, 1], "rope_options": {"scale_x": 2.0}, "run_vx": True, "a2v_cross_attn": False,
        "stg_self_attn_blocks": frozenset([1]), "audio_embeds": SIGMA,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optimized_attention_override": print}, "another attention function (choose the kernel in Parallel Config)"),
        ({"of_a_pack": print}, "the transformer option of_a_pack"),
        ({"ar_state": {"start_frame": 0}}, "the memory of an autoregressive sampler"),
    ],
)
def test_options_that_are_no_data_or_are_written_to_are_named(options, name):
    assert option_obstacles(options) == [name]


def test_each_branch_is_told_which_one_it_is_and_keeps_what_is_shared():
    options = Shared({"cond_or_uncond": [1, 0], "rope_options": {"scale_x": 2.0}})
    call = make_call((1, 0), transformer_options=options, mask=Shared(torch.zeros(4, 1)))
    branches = split_branches([call])
    assert list(branches) == [0, 1]
    for index, part in branches.items():
        assert part["transformer_options"].value == {"cond_or_uncond": [index], "rope_options": {"scale_x": 2.0}}
        assert part["mask"].value.shape == (4, 1)
        assert part["context"].shape[0] == 2


def test_arguments_that_are_one_for_all_rows_are_marked():
    def forward(x, timestep, context, audio=None, frame_rate=25):
        """A network."""

    given = {"context": torch.ones(2, 3), "audio": torch.ones(2, 5), "frame_rate": 24}
    call = read_call(inspect.signature(forward), (torch.ones(2, 4), SIGMA), given, {"audio", "frame_rate"})
    assert isinstance(call.conditioning["audio"], Shared)
    assert call.conditioning["frame_rate"] == 24
    assert isinstance(call.conditioning["context"], torch.Tensor)
