"""Ours beside ComfyUI, diffusers and xDiT: the same FLUX.1-dev sized model, weights and inputs, in one run.

    python -m benchmarks.compare --set rivals --comfyui ~/ComfyUI        # 1, 2 and 4 GPUs: docs/performance.md
    python -m benchmarks.compare --set pipefusion [--no-p2p]             # PipeFusion beside the other splits
    python -m benchmarks.compare --set pipefusion --dry-run              # what would run when, and for how long
    python -m benchmarks.compare --rivals ours,diffusers --ranks 4 --sizes 1024
    python -m benchmarks.compare --tiny --rivals ours,diffusers           # on CPUs: do the outputs agree?
    python -m benchmarks.compare --plot benchmarks/results/compare.json  # the plot alone, anywhere

Every case (a rival, a number of GPUs, a size) runs in fresh processes and within a time limit; one that fails, or that
is not installed, becomes a line with the reason. Cases of fewer GPUs than there are run beside each other, unless
--alone is given. `pip install xfuser` and `pip install matplotlib` for xDiT and for the plot; ComfyUI's folder comes
from --comfyui or $COMFYUI_PATH, and needs its requirements in this Python. Results are written after each case:
compare.json, .md and .png in --out, for --set pipefusion compare-pipefusion, with --no-p2p one that ends in -no-p2p.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rivals.case import RIVALS, Case
from .rivals.launch import Run, count_gpus
from .rivals.plan import DEFAULT_RIVALS, EXTRA_RIVALS, SETS, Setting, plan_cases, plan_set
from .rivals.report import describe_machine, merge, plot, show_plan, table, write
from .rivals.results import Results
from .rivals.schedule import Gpus, Outcome, Queue, Turn, estimate, order_turns

SHORTEST = 20.0
"""Seconds; a case is not begun with less time left."""


def run_cases(
    cases: list[Case],
    seconds: float,
    on_row: Callable[[list[dict[str, Any]], dict[str, Any]], None],
    gpus: int | None = None,
    alone: bool = False,
) -> list[dict[str, Any]]:
    """Run all cases within `seconds`, side by side where GPUs are free; return their rows in the order of `cases`.

    Args:
        on_row: gets the rows so far, and the new one among them, after each case.
        gpus: of this machine, by default all.
        alone: one case after the other.
    """
    deadline = time.monotonic() + seconds
    results = Results(cases)
    count = gpus if gpus is not None else _machine(cases)

    def begin(case: Case, taken: tuple[int, ...]) -> Run:
        return Run(case, taken, count)

    def grant(case: Case) -> float:
        left = deadline - time.monotonic()
        return min(case.limit, left) if left >= SHORTEST else 0.0

    def tell(turn: Turn, outcome: Outcome) -> None:
        row = results.add(turn.place, outcome)
        on_row(results.rows(), row)

    known = [place for place, case in enumerate(cases) if case.rival in RIVALS]
    for place in range(len(cases)):
        if place not in known:
            on_row(
                results.rows(),
                results.add(place, ({"reason": f"unknown; the rivals are {', '.join(RIVALS)}"}, None)),
            )
    turns = [turn for turn in order_turns(cases, count, alone) if turn.place in known]
    # What runs alone has no neighbour's imports beside it either.
    Queue(turns, Gpus(count), begin, grant, tell, ahead=not alone).run()
    return results.rows()


def _machine(cases: list[Case]) -> int:
    """GPUs, or as many places as the widest case needs on CPUs."""
    return max((case.ranks for case in cases), default=1) if any(case.tiny for case in cases) else count_gpus()


def read_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, help="a table's rivals, numbers of GPUs and sizes")
    default = [*DEFAULT_RIVALS, *EXTRA_RIVALS]
    known = f"some of {', '.join(RIVALS)}; by default the set's, or {', '.join(default)}"
    parser.add_argument("--rivals", type=lambda text: text.split(","), help=known)
    parser.add_argument("--ranks", type=_numbers, help="numbers of GPUs, by default the set's, or 1,2,4 (--tiny: 1,2)")
    parser.add_argument("--sizes", type=_numbers, help="pixels along a side, by default the set's, or 1024,2048")
    parser.add_argument("--no-p2p", action="store_true", help="exchange through the host's memory, as over PCIe")
    parser.add_argument("--alone", action="store_true", help="one case after the other")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with estimated seconds; needs no GPU")
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", ""), help="its folder")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a case")
    parser.add_argument("--seconds", type=float, default=470, help="for everything")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPUs; writes only where --out says")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--add", type=Path, metavar="JSON", help="a finished run's rows, to which these are added")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the plot of a finished run, beside it")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def plan(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    setting = Setting(options.tiny, options.comfyui, options.limit, p2p=not options.no_p2p)
    if options.set:
        return plan_set(options.set, setting, options.rivals, options.ranks, options.sizes)
    ranks = options.ranks or ([1, 2] if options.tiny else [1, 2, 4])
    sizes = options.sizes or ([64] if options.tiny else [1024, 2048])
    return plan_cases(options.rivals or [*DEFAULT_RIVALS, *EXTRA_RIVALS], ranks, sizes, setting)


def main() -> None:
    """Run, print, write."""
    options = read_options()
    if options.plot:
        print(plot(json.loads(options.plot.read_text())["rows"], options.plot.with_suffix(".png")))
        return
    cases = plan(options)
    if options.dry_run:
        count = max([1, count_gpus(), *(case.ranks for case in cases)])
        turns = order_turns(cases, count, options.alone)
        print(show_plan(turns, estimate(turns, count, ahead=not options.alone)))
        return
    # The time limit of whoever runs us should not leave processes on the GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    out = options.out or (None if options.tiny else Path("benchmarks/results"))
    stem = "compare" + "-pipefusion" * (options.set == "pipefusion") + "-no-p2p" * options.no_p2p
    before = json.loads(options.add.read_text())["rows"] if options.add else []
    started = time.monotonic()

    def on_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {json.dumps(row)}", flush=True)
        if out:
            write(merge(before, rows), describe_machine(rows, options.comfyui), out / f"{stem}.json")

    rows = merge(before, run_cases(cases, options.seconds, on_row, alone=options.alone))
    print(f"\n{describe_machine(rows, options.comfyui)['text']}\n\n{table(rows)}")
    if out:
        print(plot(rows, out / f"{stem}.png"))


if __name__ == "__main__":
    main()
