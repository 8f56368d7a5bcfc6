"""What a rank keeps for requests to come: a model (survey, load, release), weight patches, networks beside it."""

from __future__ import annotations

from dataclasses import replace

from ..config import ParallelConfig
from ..mesh.agreement import offer_same
from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.module_tree import build_module
from ..planning.explanation import details_of, explain
from ..planning.plan import choose, plan_loading
from ..planning.weights_choice import choose_weights
from ..planning.wish import TYPICAL, Wish, typical
from ..requests.control import Control
from ..requests.facts import CPU, MachineFacts
from ..requests.requests import Attach, Finished, KeepPatches, Load, Loaded, Release, Survey, Surveyed, attached_name
from .measure import measure_machine
from .opened import Opened
from .rank_state import Agreed, Outcome, Prepared, RankState, Tensors, require_same

_FREE = "free on {}"
_STEP = 512 << 20  # what is free counts in whole ones, so that a little more or less of it makes no other plan


def prepare_survey(state: RankState, request: Survey) -> Prepared:
    """What a load would take: open the file, and offer what this rank has. Refused as the load would be."""
    load = request.load
    opened = state.open(load, ahead=True)
    wish = _wish(state, load, opened, replace(load.machine or CPU, free_each=()))
    needs = opened.in_file(choose(wish).cost.weight_bytes)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        held = state.residency.held()
        each = (agreed[_FREE.format(rank)] for rank in range(load.ranks))
        free = tuple(max(1, free // _STEP * _STEP) for free in each)
        return Surveyed(free, 0 if load.model in held else needs, held), {}

    # A rank that the model does not use may be as full as it likes.
    offers = {_FREE.format(state.rank): state.residency.store.could_have()} if state.rank < load.ranks else {}
    return Prepared(run_it=work, offers=offers)


def _wish(state: RankState, request: Load, opened: Opened, machine: MachineFacts) -> Wish:
    """The same on every rank: from the request, and from the collective that an engine starts with."""
    config = ParallelConfig.from_mapping(request.config)
    machine = replace(machine, speeds=tuple(state.meshes.speeds or ()))
    wish = Wish(config, request.ranks, opened.facts, TYPICAL, machine)
    return replace(wish, config=choose_weights(wish, opened.weight_bytes))


_FACTS = "facts"
"""All later plans are made from what a rank read of the file, so ranks that read something else stop at once."""


def prepare_load(state: RankState, request: Load, control: Control) -> Prepared:
    """The model comes to the devices, or is there already: open the file, plan, and have the weights."""
    # Whatever fails on all ranks alike comes before any model is let go.
    opened = state.open(request)
    wish = _wish(state, request, opened, request.machine or CPU)
    loaded = plan_loading(wish)
    wish = replace(wish, loaded=loaded)
    choose(wish)
    machine = wish.machine
    place = state.meshes.place(loaded) if loaded.pipe > 1 else None
    resident, reused = state.residency.load(request, wish, opened, place, control)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Measure what was not measured yet, and tell of the model."""
        require_same(_FACTS, agreed, request.path)
        if not machine.measured and machine.on_gpu:
            control.measuring()
        measured = machine if machine.measured else measure_machine(machine, state.device, state.world_size)
        state.machine = replace(measured, free_each=())  # requests to come find other models here
        picture = typical(*request.size) if wish.config.patches is None else TYPICAL
        shown = replace(wish, request=picture, machine=measured)
        title, held, known = resident.family.title, state.residency.held(), replace(state.machine, speeds=())
        size = 0 if resident.loaded_model is None else resident.loaded_model.weights.size
        return Loaded(title, size, reused, explain(shown), known, loaded.pipe, held, details_of(shown)), {}

    def undo() -> None:
        """Let a model go that was not here before."""
        if not reused:
            state.residency.forget(request.model)

    return Prepared(run_it=work, undo=undo, offers=offer_same(_FACTS, resident.facts))


_UNLOADED = "unloaded"
"""A rank offers 1 where a `Release` leaves it no model: peer memory goes when none is left on any."""


def prepare_release(state: RankState, request: Release) -> Prepared:
    """A model leaves the devices, or goes to the host's memory. Nothing goes before all ranks are ready."""

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        state.forget_requests()
        if agreed[_UNLOADED]:
            state.meshes.groups.free_memory()
            state.residency.forget_runs()
        freed = state.residency.give_back(request.model, request.park)
        return Finished(bytes_freed=freed, held=state.residency.held()), {}

    return Prepared(run_it=work, offers={_UNLOADED: int(not state.residency.has_others(request.model))})


def prepare_attach(state: RankState, request: Attach) -> Prepared:
    """A network beside the model. Every rank keeps it by itself; conditionings name it by its number."""

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Keep the tensors; with the last of them the network is made."""
        if request.kept is not None:
            gone = state.conditionings.detach(request.kept)
            state.calls = {kind: call for kind, call in state.calls.items() if not call.names(gone)}
        if tensors:
            state.arriving.setdefault(request.number, {}).update(tensors)
        if request.form is not None:
            arrived = state.arriving.get(request.number, {})
            parts = [arrived[attached_name(place)] for place in range(len(arrived))]
            state.conditionings.attached[request.number] = build_module(request.form, parts)
            state.arriving.clear()
        return Finished(held=state.residency.held()), {}

    return Prepared(run_it=work)


def prepare_patches(state: RankState, request: KeepPatches) -> Prepared:
    """Weight patches, which calls to come name, and ComfyUI's code, which computes with them."""
    code = request.comfyui
    use_comfyui(code.folder, {**code.options, "cpu": state.device.type == "cpu"})

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        state.patches.keep(request, tensors)
        return Finished(), {}

    # By way of a GPU a LoRA of 155 MB took 4.5 s, most of it back into new pages of the host.
    return Prepared(run_it=work, on_host=True)
