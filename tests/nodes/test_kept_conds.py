"""Conditionings are brought to the device once a run, where nothing would see it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

COMFYUI = find_comfyui()
if COMFYUI is None:
    pytest.skip(HOW, allow_module_level=True)
pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def conds():
    """ComfyUI's conditioning classes, and ours."""
    theirs, ours = import_with_comfyui("comfy.conds", "nodes.remote_model")
    return SimpleNamespace(theirs=theirs, ours=ours)


class Model:
    """A model whose conditionings are of every kind that is brought, and others."""

    def __init__(self, conds):
        self.theirs = conds.theirs
        self.current_patcher = SimpleNamespace(model_options={}, wrappers={})

    def extra_conds(self, **arguments):
        texts = arguments["texts"]
        return {
            "c_crossattn": self.theirs.CONDCrossAttn(texts),
            "y": self.theirs.CONDRegular(texts[:, 0] + 1),
            "c_concat": self.theirs.CONDNoiseShape(arguments["image"]),
            "guidance": self.theirs.CONDConstant(3.5),
        }


def test_a_prompt_is_brought_to_the_device_once_and_is_else_comfyui_s_own(conds):
    model = Model(conds)
    texts, image = torch.randn(1, 5, 6), torch.randn(1, 2, 8, 8)
    theirs = model.extra_conds(texts=texts, image=image)
    shared: set[str] = set()
    ours = conds.ours.keeping(model, shared)(texts=texts, image=image, device=torch.device("cpu"))
    assert shared == {"guidance"}
    assert {name: type(cond) for name, cond in ours.items()} == {name: type(cond) for name, cond in theirs.items()}
    for name in ("c_crossattn", "y"):
        assert torch.equal(ours[name].cond, theirs[name].cond)
    assert ours["c_concat"].cond is image
    moved = conds.ours.keeping(model, set())(texts=texts, image=image, device=torch.device("meta"))
    assert [moved[name].cond.device.type for name in ("c_crossattn", "y", "c_concat")] == ["meta", "meta", "cpu"]


@pytest.mark.parametrize(
    ("wrappers", "options", "brought"),
    [
        ({"sampler_sample": {"parallel_dit": [print]}}, {}, True),  # which every MODEL of ours has
        ({"apply_model": {"a node": []}}, {}, True),
        ({"apply_model": {"a node": [print]}}, {}, False),
        ({}, {"transformer_options": {"wrappers": {"diffusion_model": {"a node": [print]}}}}, False),
        ({}, {"model_function_wrapper": print}, False),
    ],
    ids=["around the loop", "none", "around the call", "around the network", "a function"],
)
def test_text_stays_where_it_is_before_a_wrapper_that_would_see_it(conds, wrappers, options, brought):
    model = Model(conds)
    model.current_patcher = SimpleNamespace(model_options=options, wrappers=wrappers)
    texts, image = torch.randn(1, 5, 6), torch.randn(1, 2, 8, 8)
    made = conds.ours.keeping(model, set())(texts=texts, image=image, device=torch.device("meta"))
    assert made["c_crossattn"].cond.is_meta is brought
