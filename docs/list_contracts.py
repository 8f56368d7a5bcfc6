"""`python -m docs.list_contracts`: writes docs/comfyui-contracts.md from parallel_runtime/comfyui_contracts.py."""

from __future__ import annotations

from pathlib import Path

from parallel_runtime.comfyui_contracts import CONTRACTS, NEWEST_READ, NEWEST_RUN, OLDEST_RUN, Contract

PAGE = Path(__file__).resolve().parent / "comfyui-contracts.md"
_HEAD = f"""# What the pack relies on in ComfyUI

*Made by `python -m docs.list_contracts` from parallel_runtime/comfyui_contracts.py; a test compares the two, and
another one holds each line against the ComfyUI that is there.*

Each line is a function or class of ComfyUI's, and the arguments that the pack gives it, or that its method in the
place of ComfyUI's takes. At its start the pack holds all of them against the ComfyUI that loads it, and says in the log
and in the panel what is not kept, or that a ComfyUI is newer than {NEWEST_READ}, the newest that was read. It then
works as far as it can: tokens are shared out only where a network's class still fits its entry
([models.md](models.md)), and else CFG branches and pictures are.

The host tests ran with each in ComfyUI {OLDEST_RUN} to {NEWEST_RUN}, and its source was read in {NEWEST_RUN}. *Newer*:
{OLDEST_RUN} has it not, and the pack does without it there. *Read*: also in {NEWEST_READ}.
"""


def write_page() -> str:
    """The page."""
    sections = {"Overridden": True, "Called": False}
    return _HEAD + "".join(
        f"\n## {title}\n\n| Contract | Arguments | |\n|---|---|---|\n"
        + "".join(_row(each) for each in CONTRACTS if each.overridden is overridden)
        for title, overridden in sections.items()
    )


def _row(contract: Contract) -> str:
    arguments = f"`{', '.join(contract.arguments)}`" if contract.arguments else ""
    marks = ", ".join(mark for mark, holds in (("newer", contract.newer), ("read", contract.read)) if holds)
    return f"| `{contract.place.replace(':', '.')}` | {arguments} | {marks} |\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
