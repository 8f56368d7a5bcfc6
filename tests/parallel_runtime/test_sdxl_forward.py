"""SDXL on P ranks: rows of the batch are shared out, tokens never; against one rank, and what the planner says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelConfig, ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.networks.diffusers.sdxl import SDXL
from parallel_runtime.networks.facts import describe, describe_request
from parallel_runtime.planning.explanation import explain
from parallel_runtime.planning.plan import choose
from parallel_runtime.planning.wish import Wish
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.facts import CPU, NVLINK, ModelFacts, RequestFacts, known_gpu
from tests.parallel_runtime.model_forward import relative_error
from tests.ranks import run_ranks
from tests.tiny_model import make_state_dict
from tests.tiny_sdxl import ATTENDING_DOWN, ATTENDING_UP, DOWN, KINDS, UP, make_call, tiny_config

KOALA = KINDS["KOALA"]
ONE_WIDTH = tiny_config(
    block_out_channels=(32, 64),
    down_block_types=(DOWN, ATTENDING_DOWN),
    up_block_types=(ATTENDING_UP, UP),
    layers_per_block=1,
    attention_head_dim=(1, 1),
    transformer_layers_per_block=(1, 1),
)
PLANS = [{"cfg": 2}, {"data": 2}]
H200 = known_gpu("NVIDIA H200", 150 * 2**30, NVLINK)


def build(config: dict[str, Any]) -> Any:
    """The U-Net, the same in every process."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(**config)
    unet.load_state_dict(make_state_dict(SDXL, config))
    return unet.requires_grad_(False).eval()


def _call(*args: Any, **kwargs: Any) -> Call:
    given = make_call(*args, **kwargs)
    x, timestep = given.pop("x"), given.pop("timestep")
    return Call(x, timestep, Conditioning(given))


def requests() -> dict[str, list[Call]]:
    """Calls of one evaluation each."""
    return {
        "two branches, unequal prompts": [_call(1, (8, 10), text=9), _call(2, (8, 10), text=5)],
        "a ready batch of two": [_call(3, (9, 7), 2)],
        "three pictures": [_call(4, (8, 8), 3)],
        "one picture, which leaves a rank without rows": [_call(5, (8, 8))],
    }


def run_plans(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: every request on every plan."""
    meshes = [build_mesh(ParallelPlan(**plan), rank, world_size) for plan in PLANS]
    transformer = parallelize(build(KOALA), SDXL, single_rank_mesh())
    return {
        f"{number} {name} {position}": output
        for number, mesh in enumerate(meshes)
        for name, calls in requests().items()
        for position, output in enumerate(Predictor(transformer, mesh)(calls))
    }


@pytest.mark.slow
def test_cfg_2_and_data_2_give_the_one_process_result_on_every_rank():
    results = run_ranks(2, f"{__name__}:run_plans")
    unet = build(KOALA)
    for name, calls in requests().items():
        for position, call in enumerate(calls):
            given = SDXL.to_transformer(call.x, call.timestep, config=unet.config, **call.conditioning.arguments)
            with torch.no_grad():
                expected = unet(**given).sample
            for number, plan in enumerate(PLANS):
                for result in results:
                    assert relative_error(result[f"{number} {name} {position}"], expected) < 1e-5, (plan, name)


@pytest.mark.long
def test_compiled_transformer_blocks_without_graph_breaks_give_the_same_result():
    from torch._dynamo.utils import counters

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    expected = Predictor(parallelize(build(ONE_WIDTH), SDXL, single_rank_mesh()), single_rank_mesh())
    compiled = parallelize(build(ONE_WIDTH), SDXL, single_rank_mesh(), compile=True)
    blocks = [path for path, module in compiled.named_modules() if "forward" in vars(module)]
    assert len(blocks) == 4  # down, middle, and two on the way up
    assert all(path.endswith(".transformer_blocks.0") for path in blocks)
    calls = [_call(6, (6, 4), 2)]
    graphs = counters["stats"]["unique_graphs"]
    output = Predictor(compiled, single_rank_mesh())(calls)[0]
    assert counters["stats"]["unique_graphs"] > graphs
    assert relative_error(output, expected(calls)[0]) < 1e-5


@pytest.mark.slow
def test_the_timestep_stays_exact_in_bfloat16():
    unet, reference = build(KOALA).bfloat16(), build(KOALA)
    reference.load_state_dict(unet.state_dict())  # the same weights, rounded alike
    given = make_call(7, (8, 8))
    given = {name: value.bfloat16().float() for name, value in given.items()} | {"timestep": torch.tensor([903.7])}
    rounded = {name: value if name == "timestep" else value.bfloat16() for name, value in given.items()}
    with torch.no_grad():
        expected = reference(**SDXL.to_transformer(**given, config=KOALA)).sample
        wrapped = parallelize(unet, SDXL, single_rank_mesh())
        output = wrapped(**SDXL.to_transformer(**rounded, config=KOALA), return_dict=False)[0]
        other = given | {"timestep": torch.tensor([904.0])}  # what bfloat16 would make of it
        moved = reference(**SDXL.to_transformer(**other, config=KOALA)).sample
    assert output.dtype == torch.bfloat16
    assert relative_error(moved, expected) > 1e-4
    assert relative_error(output, expected) < 0.03


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    from diffusers import UNet2DConditionModel

    # SDXL base itself, without its memory.
    config = tiny_config(
        block_out_channels=(320, 640, 1280),
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=2048,
        projection_class_embeddings_input_dim=2816,
    )
    with torch.device("meta"):
        return describe(UNet2DConditionModel(**config), None, "SDXL", 2, (SDXL.token, SDXL.token))


def _request(batch: int) -> RequestFacts:
    return describe_request([(128, 128)], (SDXL.token, SDXL.token), 0, batch, 20)


def test_the_facts_are_those_of_the_published_model(facts):
    assert facts.parameters == 2_567_463_684
    assert not facts.splits_sequence
    assert not facts.has_stages


@pytest.mark.parametrize("machine", [CPU, H200], ids=["CPU", "H200"])
@pytest.mark.parametrize(
    ("batch", "ranks", "batch_ways"), [(1, 4, 1), (2, 4, 2), (2, 2, 2), (4, 4, 4), (8, 8, 8), (6, 4, 3)]
)
def test_auto_shares_out_the_batch_alone(facts, machine, batch, ranks, batch_ways):
    plan = choose(Wish(ParallelConfig(), ranks, facts, _request(batch), machine)).plan
    assert (plan.sequence, plan.pipe) == (1, 1)
    assert plan.batch == batch_ways


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_explanation_says_what_ranks_share_out(facts, ranks):
    for machine in (CPU, H200):
        text = explain(Wish(ParallelConfig(), ranks, facts, _request(2), machine))
        says = "SDXL is not split inside of a picture, as it convolves over the whole picture: devices share out CFG"
        assert (says in text) == (ranks > 1)


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"ulysses": 2}, "Degree ulysses is 2, and the tokens of SDXL cannot be split: it convolves"),
        ({"ring": 2, "cfg": 2}, "Degree ring is 2, and the tokens of SDXL cannot be split: it convolves"),
        ({"pipe": 2}, "SDXL cannot be cut into stages"),
    ],
)
def test_degrees_that_split_a_picture_are_refused_with_a_valid_choice(facts, wish, named):
    with pytest.raises(ConfigurationError, match=named) as error:
        choose(Wish(ParallelConfig(**wish), 4, facts, _request(2), CPU))
    assert "auto or 1" in error.value.fix
    valid = {axis: 1 for axis in wish if axis != "cfg"}
    choose(Wish(ParallelConfig(**{**wish, **valid}), 4, facts, _request(2), CPU))


def test_a_named_attention_backend_is_refused_by_the_wrapper():
    unet = build(ONE_WIDTH)
    with pytest.raises(ConfigurationError, match="not with flash3"):
        parallelize(unet, SDXL, single_rank_mesh(), attention="flash3")
    parallelize(unet, SDXL, single_rank_mesh(), attention="sdpa")
