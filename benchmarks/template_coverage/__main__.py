"""Prints which official templates convert to our loaders; `--write-docs` makes pages of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .installed import PACKAGE, installed_version, read_templates
from .newer import NEWEST_RUN
from .totals import judge_all, known_here, lack_totals, reason_totals, step_totals, total, total_lines


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.template_coverage", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found of each template")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/models.md and benchmarks/results/templates_executed.md"
    )
    parser.add_argument("--execute", type=int, metavar="N", help="run N that convert, small, against the same graph")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn for --execute")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="run these for --execute")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add a line of JSON for each that was run")
    arguments = parser.parse_args()
    version = installed_version()
    if version is None:
        print(f"{PACKAGE} is not installed: pip install it, or run where ComfyUI's requirements are.", file=sys.stderr)
        return 1
    templates = list(read_templates())
    judged = judge_all(templates)
    if arguments.execute is not None or arguments.only:
        from .execution import draw, executable, execute_all, find_comfyui, write_results  # imports torch
        from .models_page import EXECUTED

        able = executable(judged)
        drawn = [each for each in able if each.name in arguments.only] or draw(able, arguments.execute, arguments.seed)
        done = execute_all(drawn, templates, find_comfyui(), arguments.results)
        print(f"{sum(each.same for each in done)} of {len(done)} give ComfyUI's latents")
        if not arguments.write_docs:
            return int(not all(each.same for each in done))
        how = f"`--execute {arguments.execute} --seed {arguments.seed}` drew them, one of each family first"
        write_results(done, how, EXECUTED)
    for each in judged:
        families = "; ".join(map(str, each.runners))
        loop = "pool" if each.loops_in_pool else f"steps: {', '.join(each.steps)}"
        print(f"{each.status:9}  {each.usage:6}  {each.name}  [{families}]  {each.why}  {loop}".rstrip())
    whole = total(known_here(judged))
    print(f"\n{PACKAGE} {version}: {len(judged)} templates sample with a local diffusion model")
    for what, count in total_lines(judged):
        print(f"{what}: {count}")
    print("\nfirst reasons of the others, by use:")
    for reason, found in reason_totals(judged):
        print(f"  {found.of(whole)}: {reason}")
    print(f"\nwhat ComfyUI {NEWEST_RUN} lacks of the others, by use:")
    for lacks, templates_of in lack_totals(judged):
        print(f"  {total(templates_of).of(total(judged))}: {', '.join(lacks)}")
    print("\nwhy loops go step by step, by use; a template may have several:")
    for reason, found in step_totals(judged):
        print(f"  {found.of(whole)}: {reason}")
    if arguments.json is not None:
        data = {
            "package": f"{PACKAGE} {version}",
            "totals": dict(total_lines(judged)),
            "templates": [each.as_data() for each in judged],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if arguments.write_docs:
        from .models_page import (
            EXECUTED_PAGE,
            PAGE,
            write_executed,
            write_page,
        )  # imports torch, for diffusers' families

        PAGE.write_text(write_page(judged, version), encoding="utf-8")
        EXECUTED_PAGE.write_text(write_executed(judged), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
