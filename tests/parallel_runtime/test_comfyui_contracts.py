"""What the pack relies on in ComfyUI is kept by the one that is here, and a change is said in a sentence."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from docs.list_contracts import PAGE, write_page
from parallel_runtime import comfyui_contracts
from parallel_runtime.comfyui_contracts import CONTRACTS, Contract, broken_contracts, newer_than_known
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui


def called(model, steps=1):
    pass


def all_kinds(model, **more):
    pass


@pytest.mark.parametrize(
    ("contract", "how"),
    [
        (Contract("of_tomorrow:called", ("model",)), None),
        (Contract("of_tomorrow:called", ("model", "steps")), None),
        (Contract("of_tomorrow:called", ("model",), overridden=True), "it takes steps as well"),
        (Contract("of_tomorrow:called", ("steps",)), "it asks for model"),
        (Contract("of_tomorrow:called", ("model", "cfg", "seed")), "it takes no cfg, seed"),
        (Contract("of_tomorrow:all_kinds", ("model", "cfg")), None),
        (Contract("of_tomorrow:all_kinds.inner"), "it is gone"),
        (Contract("of_tomorrow:gone", newer=True), None),
        (Contract("of_yesterday:called"), "it is gone"),
    ],
)
def test_a_change_is_said_in_a_sentence(monkeypatch, contract, how):
    monkeypatch.setitem(sys.modules, "of_tomorrow", SimpleNamespace(called=called, all_kinds=all_kinds))
    said = broken_contracts([contract])
    place = contract.place.replace(":", ".")
    expected = f"This ComfyUI changed {place}, which the pack uses: {how}. Update the pack."
    assert said == ([] if how is None else [expected])


@pytest.mark.parametrize(("version", "newer"), [("0.8.0", False), ("0.38.1", False), ("0.38.2", True), ("1.0", True)])
def test_a_comfyui_newer_than_any_that_was_run_or_read_is_told(version, newer):
    assert (newer_than_known(version) is not None) == newer


def test_notes_are_those_of_this_process(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__="99.1"))
    monkeypatch.setattr(comfyui_contracts, "broken_contracts", lambda: ["one"])
    comfyui_contracts.host_notes.cache_clear()
    first, second = comfyui_contracts.host_notes()
    comfyui_contracts.host_notes.cache_clear()
    assert first == "one"
    assert "99.1" in second


def test_the_page_has_what_the_code_has():
    assert PAGE.read_text(encoding="utf-8") == write_page(), "run: python -m docs.list_contracts"


@pytest.mark.host
@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_the_comfyui_that_is_here_keeps_every_contract():
    import_with_comfyui("comfy.sd", "comfy.sample", "comfy.model_patcher")
    assert broken_contracts() == []


@pytest.mark.host
@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_every_method_that_is_overridden_is_listed():
    (ours,) = import_with_comfyui("nodes.remote_patcher")
    theirs = import_module("comfy.model_patcher").ModelPatcher
    overridden = {
        name
        for name, each in vars(ours.RemoteModelPatcher).items()
        if inspect.isfunction(each) and hasattr(theirs, name)
    }
    listed = {each.place.rpartition(".")[2] for each in CONTRACTS if each.overridden}
    assert overridden <= listed
