"""`python -m docs.list_contracts`: writes docs/comfyui-contracts.md from parallel_runtime/comfyui_contracts.py."""

from __future__ import annotations

from pathlib import Path

from parallel_runtime.comfyui_contracts import CONTRACTS, NEWEST_READ, NEWEST_RUN, OLDEST_RUN, Contract

PAGE = Path(__file__).resolve().parent / "comfyui-contracts.md"
_HEAD = f"""# What the pack relies on in ComfyUI

*Made by `python -m docs.list_contracts` from parallel_runtime/comfyui_contracts.py; a test compares the two, and
another one holds each line against the ComfyUI that is there.*

Each line is a function or class of ComfyUI's, and the arguments that the pack gives it, or that its method in the place
of ComfyUI's takes. At its start the pack holds all of them against the ComfyUI that loads it. What is not kept is said
in a sentence in the log and in the panel, and so is a ComfyUI newer than {NEWEST_READ}, the newest that was read. The
pack then works as far as it can: tokens are shared out only where a network's class still fits its entry
([models.md](models.md)), and else CFG branches and pictures are.

"Run" is the oldest and the newest version in which the host tests ran with it; "from" is a version that has it where
{OLDEST_RUN} has not, and the pack does without it there. "Read" is the newest whose source was read for it.

| Contract | Arguments | | Run | Read |
|---|---|---|---|---|
"""


def write_page() -> str:
    """The page."""
    return _HEAD + "".join(map(_row, CONTRACTS))


def _row(contract: Contract) -> str:
    arguments = f"`{', '.join(contract.arguments)}`" if contract.arguments else ""
    run = f"newer than {OLDEST_RUN}, to {NEWEST_RUN}" if contract.newer else f"{OLDEST_RUN} to {NEWEST_RUN}"
    how = "overridden" if contract.overridden else "called"
    read = NEWEST_READ if contract.read else NEWEST_RUN
    return f"| `{contract.place.replace(':', '.')}` | {arguments} | {how} | {run} | {read} |\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
