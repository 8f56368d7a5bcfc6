"""What comes to a rank to be kept until a request wants it, prepared: weight patches, and networks beside the model."""

from __future__ import annotations

from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.module_tree import build_module
from ..requests.answers import Finished
from ..requests.control import Control
from ..requests.requests import Attach, KeepPatches, attached_name
from .prepared import Agreed, Outcome, Prepared, Tensors
from .rank_state import RankState


def prepare_attach(state: RankState, request: Attach) -> Prepared:
    """A network beside the model. Every rank keeps it by itself; conditionings name it by its number."""

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Keep the tensors; with the last of them the network is made."""
        if request.kept is not None:
            state.detach(request.kept)
        if tensors:
            state.arriving.setdefault(request.number, {}).update(tensors)
        if request.form is not None:
            arrived = state.arriving.get(request.number, {})
            parts = [arrived[attached_name(place)] for place in range(len(arrived))]
            state.conditionings.attach(request.number, build_module(request.form, parts))
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
