"""`python -m docs.list_contracts`: writes docs/comfyui-contracts.md from parallel_runtime/comfyui_contracts.py."""

from __future__ import annotations

from pathlib import Path

from parallel_runtime.comfyui_contracts import CONTRACTS, NEWEST_READ, NEWEST_RUN, OLDEST_RUN, Contract

PAGE = Path(__file__).resolve().parent / "comfyui-contracts.md"
_HEAD = f"""# What the pack relies on in ComfyUI

*Made by `python -m docs.list_contracts` from parallel_runtime/comfyui_contracts.py; tests compare the two, and
hold each entry against the ComfyUI that is there.*

Functions and classes of ComfyUI's by their module, with the arguments that the pack gives them, or that its method in
the place of ComfyUI's takes. At its start the pack holds all of them against the ComfyUI that loads it, and says in the
log and in the panel what is not kept, or that a ComfyUI is newer than {NEWEST_READ}, the newest that was read. It then
works as far as it can: tokens are shared out only where a network's class still fits its entry
([models.md](models.md)), and else CFG branches and pictures are.

The host tests ran with each in ComfyUI {OLDEST_RUN} to {NEWEST_RUN}, and its source was read in {NEWEST_RUN}. †:
{OLDEST_RUN} has it not, and the pack does without it there. **Bold**: read in {NEWEST_READ}, too.
"""

_OVERRIDDEN_UNREAD = {
    "state_dict_for_saving", "add_hook_patches", "patch_hooks", "unpatch_hooks", "pre_run", "deepclone_multigpu",
    "model_patches_models",
}  # fmt: skip
_CALLED_READ = {
    "ModelPatcher.get_all_callbacks", "ModelPatcher.add_wrapper_with_key", "KSampler", "KSAMPLER.sample",
    "sampler_object", "CFGGuider.predict_noise", "load_diffusion_model", "load_diffusion_model_state_dict",
}  # fmt: skip
"""Of what the pack overrides, what was not read in NEWEST_READ; of what it calls, what was."""


def write_page() -> str:
    """The page."""
    text = _HEAD
    for title, overridden in {"Overridden": True, "Called": False}.items():
        modules: dict[str, list[str]] = {}
        for each in CONTRACTS:
            if each.overridden is overridden:
                modules.setdefault(each.place.partition(":")[0], []).append(_entry(each))
        text += f"\n## {title}\n\n"
        text += "".join(f"- `{module}`: {', '.join(entries)}\n" for module, entries in modules.items())
    return text


def _entry(contract: Contract) -> str:
    arguments = f"({', '.join(contract.arguments)})" if contract.arguments else ""
    place = contract.place.partition(":")[2]
    read = place in _CALLED_READ
    if contract.overridden:
        read = place.removeprefix("ModelPatcher.") not in _OVERRIDDEN_UNREAD
    name = f"`{place}{arguments}`"
    return (f"**{name}**" if read else name) + ("†" if contract.newer else "")


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
