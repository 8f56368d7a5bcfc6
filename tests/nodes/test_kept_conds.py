"""Conditionings that are put together in kept memory are what ComfyUI's own would be, call after call."""

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
    theirs, samplers, ours = import_with_comfyui("comfy.conds", "comfy.samplers", "nodes.kept_conds")
    return SimpleNamespace(theirs=theirs, cat=samplers.cond_cat, ours=ours)


class Model:
    """A model whose conditionings are of every kind that is kept, and one that is not."""

    def __init__(self, conds, wrappers=()):
        self.theirs = conds.theirs
        options, wrappers = {"transformer_options": {}}, {"apply_model": list(wrappers)}
        self.current_patcher = SimpleNamespace(model_options=options, wrappers=wrappers)

    def extra_conds(self, **arguments):
        texts = arguments["texts"]
        return {
            "c_crossattn": self.theirs.CONDCrossAttn(texts),
            "y": self.theirs.CONDRegular(texts[:, 0] + 1),
            "c_concat": self.theirs.CONDNoiseShape(arguments["image"]),
            "guidance": self.theirs.CONDConstant(3.5),
        }


def batch(model, lengths, seed, area=None):
    """Conditionings of one prompt for each length, processed as before a call."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        texts, image = torch.randn(1, length, 6, generator=generator), torch.randn(1, 2, 8, 8, generator=generator)
        made.append(model(texts=texts, image=image))
    return made


def together(conds, prompts, size, area=None):
    processed = [{name: c.process_cond(batch_size=size, area=area) for name, c in prompt.items()} for prompt in prompts]
    return conds.cat(processed)


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (4, 8)], ids=["one", "two", "unlike"])
@pytest.mark.parametrize("area", [None, (4, 4, 2, 2)], ids=["whole", "area"])
@pytest.mark.parametrize("size", [1, 3])
def test_as_comfyui_s_own(conds, lengths, area, size):
    model = Model(conds)
    theirs = batch(model.extra_conds, lengths, 1)
    ours = batch(conds.ours.keeping(model, torch.float32, set()), lengths, 1)
    wanted = together(conds, theirs, size, area)
    for _ in range(3):
        found = together(conds, ours, size, area)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value


def test_what_a_wrapper_does_to_the_text_of_one_call_is_gone_in_the_next(conds):
    model = Model(conds, wrappers=(print,))
    prompts = batch(conds.ours.keeping(model, torch.float32, set()), (5,), 1)
    first = together(conds, prompts, 1)["c_crossattn"]
    wanted = first.clone()
    first.mul_(2)
    del first
    assert torch.equal(together(conds, prompts, 1)["c_crossattn"], wanted)


def test_a_lone_prompt_is_brought_to_the_device_once_and_copied_never(conds):
    model = Model(conds)
    texts, image = torch.randn(1, 5, 6), torch.randn(1, 2, 8, 8)
    prompt = conds.ours.keeping(model, torch.bfloat16, set())(texts=texts, image=image, device=torch.device("meta"))
    assert {name: str(cond.cond.device) for name, cond in prompt.items() if name != "guidance"} == {
        "c_crossattn": "meta", "y": "meta", "c_concat": "cpu",
    }  # fmt: skip
    calls = [together(conds, [prompt], 1) for _ in range(2)]
    assert calls[0]["c_crossattn"] is calls[1]["c_crossattn"]
    assert calls[0]["c_concat"] is calls[1]["c_concat"]


def test_memory_is_kept_and_not_taken_from_who_holds_it(conds):
    model = Model(conds)
    prompts = batch(conds.ours.keeping(model, torch.float32, set()), (5, 5), 2)
    first = together(conds, prompts, 1)["c_crossattn"]
    place, copy = first.data_ptr(), first.clone()
    second = together(conds, prompts, 1)["c_crossattn"]
    assert second.data_ptr() != place
    assert torch.equal(first, copy)
    place = second.data_ptr()
    del second
    assert together(conds, prompts, 1)["c_crossattn"].data_ptr() == place


def test_text_is_cast_once_but_not_before_a_wrapper(conds):
    model = Model(conds)
    assert (
        batch(conds.ours.keeping(model, torch.bfloat16, set()), (5,), 3)[0]["c_crossattn"].cond.dtype == torch.bfloat16
    )
    assert batch(conds.ours.keeping(model, torch.bfloat16, set()), (5,), 3)[0]["y"].cond.dtype == torch.bfloat16
    assert batch(conds.ours.keeping(model, torch.bfloat16, set()), (5,), 3)[0]["c_concat"].cond.dtype == torch.float32
    for options in ({"model_function_wrapper": print}, {"transformer_options": {"wrappers": {"x": {"y": [print]}}}}):
        model.current_patcher.model_options = options
        assert (
            batch(conds.ours.keeping(model, torch.bfloat16, set()), (5,), 3)[0]["c_crossattn"].cond.dtype
            == torch.float32
        )
    wrapped = Model(conds, wrappers=(print,))
    assert (
        batch(conds.ours.keeping(wrapped, torch.bfloat16, set()), (5,), 3)[0]["c_crossattn"].cond.dtype == torch.float32
    )
