"""docs/models.md, generated: families, formats, and the official templates that convert and that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from parallel_runtime.loading.checkpoint import MODELS
from parallel_runtime.networks.tables.comfyui import NETWORKS

from .installed import PACKAGE
from .newer import NEWEST_RUN
from .small_files import find_small_file
from .totals import Judged, known_here, lack_totals, reason_totals, step_totals, total, total_lines

CANVAS = Path(__file__).resolve().parents[1] / "results" / "templates_on_canvas.json"
EXECUTED = Path(__file__).resolve().parents[1] / "results" / "templates_executed.json"
EXECUTED_PAGE = EXECUTED.with_suffix(".md")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_TEMPLATES = "## Official templates"

_HEAD = """# Models

*Made by `python -m benchmarks.template_coverage --write-docs`; a test compares it with the tables that it is made of.*

Parallel Loader and Parallel Checkpoint Loader run any diffusion model that your ComfyUI loads, by ComfyUI's own class.
A network shares out the tokens of one picture or video over the GPUs, or, where that cannot be done, CFG branches and
the pictures of a batch alone."""

_FORMATS = """## Formats

ComfyUI's own networks run in the format of the file: bf16, fp16, fp32; fp8 as it is, scaled (old and current keys) and
mixed; int8 by tensor, also rotated (`convrot`); nvfp4, mxfp8; int4 weights (`convrot_w4a4`, `asym_w4a8_int8`); GGUF by
the reader and operations of the pack ComfyUI-GGUF, compiled."""


def write_families() -> str:
    """The part of the page that depends on this project's tables alone."""
    own = [
        f"| {network.title}{f' (read in {network.read}, not run)' if network.read else ''} "
        f"| `{path.removeprefix('comfy.ldm.')}` | "
        f"{'tokens' if network.blocks else f'batch alone: {network.whole}'} | "
        f"{'yes' if network.stages else 'no'} |"
        for path, network in sorted(NETWORKS.items(), key=lambda item: (item[1].title.lower(), item[0]))
    ]
    diffusers = [
        f"| {spec.title} | `{spec.transformer_class}` | {'tokens' if spec.cut else 'batch alone'} | "
        f"{'yes' if spec.cut else 'no'} |"
        for spec in MODELS
    ]
    return "\n\n".join(
        [
            _HEAD,
            "## ComfyUI's own networks\n\nA class that is not here, of a newer ComfyUI, shares out the batch alone.\n\n"
            "| Family | Class in `comfy.ldm` | Shared out | PipeFusion |\n|---|---|---|---|\n" + "\n".join(own),
            _FORMATS,
            "## Without ComfyUI\n\n"
            "Torchrun scripts, and the demo, run folders that diffusers saved, in bf16, fp16 and fp32.\n\n"
            "| Family | Class of diffusers | Shared out | PipeFusion |\n|---|---|---|---|\n" + "\n".join(diffusers),
        ]
    )


def write_templates(judged: Sequence[Judged], version: str) -> str:
    """The part of the page that depends on the templates' package."""
    whole = total(known_here(judged))
    newer = "\n".join(
        f"| {', '.join(lacks)} | {len(found)} | {total(found).usage} | {_said_of(found)} |"
        for lacks, found in lack_totals(judged)
    )
    totals = "\n".join(f"| {what} | {count} |" for what, count in total_lines(judged))
    reasons = "\n".join(
        f"| {reason} | {found.templates} | {100 * found.usage / whole.usage:.1f} % |"
        for reason, found in reason_totals(judged)
    )
    steps = "\n".join(
        f"| {reason} | {found.templates} | {100 * found.usage / whole.usage:.1f} % |"
        for reason, found in step_totals(judged)
    )
    left = "\n".join(
        f"| `{each.name}` | {each.usage} | {'; '.join(map(str, each.judgement.reasons))} | {_families(each)} |"
        for each in judged
        if not each.judgement.converts and not each.lacks
    )
    return f"""{_TEMPLATES}

Of {PACKAGE} {version}, {len(judged)} templates sample with a local diffusion model. A template
converts when it runs with our loaders in the place of its own and nothing else changed. Read from the files, not run:
which nodes a server would execute, and what each of them does to the MODEL. *Use* is how often a template was opened,
by the package's index.

| | |
|---|---|
{totals}

What stands against the others, by the first reason:

| First reason | Templates | Use |
|---|---|---|
{reasons}

All that do not convert now; families are told by the names of their files:

| Template | Opened | Reasons | Runs on |
|---|---|---|---|
{left}

The others need a ComfyUI that came after {NEWEST_RUN}, the newest that this project has run; what was read of it says
what would stand against them there:

| What {NEWEST_RUN} lacks | Templates | Opened | Where it is there |
|---|---|---|---|
{newer}

A sampler's loop runs in the pool, whatever node samples, where nothing of the graph acts between its steps in ComfyUI's
process; elsewhere ComfyUI's loop calls the pool step by step, which is slower by some milliseconds a step. Why loops
go step by step; a template may have several reasons:

| Why | Templates | Use |
|---|---|---|
{steps}"""


def write_executed(judged: Sequence[Judged]) -> str:
    """The page that says which templates were run, by the file of results."""
    found = json.loads(EXECUTED.read_text(encoding="utf-8"))
    loops = {each.name: "pool" if each.loops_in_pool else f"steps: {', '.join(each.steps)}" for each in judged}
    rows = "\n".join(
        f"| `{each['name']}` | {', '.join(each['files'])} | {each['latents']} | {each['difference']:.0e} "
        f"| {loops.get(each['name'], '?')} |"
        for each in found["executed"]
    )
    named = {each["name"] for each in (*found["executed"], *found["left"])}
    unmade = {
        each.name: "no small file stands for "
        + ", ".join(f for f in each.judgement.files if find_small_file(f) is None)
        for each in known_here(judged)
        if each.judgement.converts and each.name not in named
    }
    why = {each["name"]: each["error"].replace("|", " ") for each in found["left"]} | unmade
    left = "\n".join(f"| `{name}` | {error} |" for name, error in why.items())
    return f"""# Executed templates

{len(found["executed"])} templates that convert, run from loader to sampler in a real ComfyUI on two ranks of a CPU, in
float32, against the same graph with Load Diffusion Model: {found["drawn"]}. `python -m
benchmarks.template_coverage --only NAME` runs one again. Files are the smallest that ComfyUI recognises, with random
weights (of the largest, they stay in float8, and products are computed in float32); encoders, decoders and pictures
stand in with random values of the family's shapes; sizes, lengths and steps are cut; all else is the template's. The
difference is the largest of any number of a sampler's latent, as a share of the latent's largest number.

| Template | Small files | Latents | Difference | Loop, by the graph |
|---|---|---|---|---|
{rows}

All others that convert were not run: nothing stands in for what they need (of some classes ComfyUI recognises the
published size alone), or ComfyUI's own graph fails, small or as it is:

| Template | Why |
|---|---|
{left}
"""


def write_canvas() -> str:
    """The part of the page that says what "Use all GPUs" made of the templates in a browser, by the file of results."""
    found = json.loads(CANVAS.read_text(encoding="utf-8"))
    others = "".join(f"\n- `{name}`: {'; '.join(wrong)}" for name, wrong in found["failed"].items())
    return f"""## By one click

*Use all GPUs*, in a loader's menu, the canvas' menu and under *Edit*, was pressed on all {found["templates"]} that
ComfyUI {NEWEST_RUN} has, in its frontend {found["frontend"]}, in a real browser
(`python -m tests.host.browser.all_templates --write benchmarks/results/templates_on_canvas.json`): the loaders of
{found["converted"]} were replaced, also inside of subgraphs; of the others it said why not. What the server would get
differed in the loaders alone, whose inputs, types and choices were valid where they had been,
{"in all of them" if not others else f"but for these:{others}"}."""


def write_page(judged: Sequence[Judged], version: str) -> str:
    """The whole page."""
    parts = write_families(), write_templates(judged, version), write_canvas(), write_run()
    return "\n\n".join(parts) + "\n"


def write_run() -> str:
    """The part of the page that says how many templates were run."""
    found = json.loads(EXECUTED.read_text(encoding="utf-8"))
    return f"""## Executed templates

{len(found["executed"])} templates that convert were run from loader to sampler in a real ComfyUI on two ranks of a CPU,
with small files, beside the same graph with Load Diffusion Model, and differ by rounding:
[which, by how much, and why the others were not](../benchmarks/results/templates_executed.md)."""


def families_of(page: str) -> str:
    """The part of a page that `write_families` makes."""
    return page.partition(f"\n\n{_TEMPLATES}")[0]


def version_of(page: str) -> str:
    """The templates' version that a page was made of; "" where it does not say."""
    found = re.search(rf"{PACKAGE} (\S+),", page)
    return found[1] if found else ""


def _said_of(found: Sequence[Judged]) -> str:
    reasons = dict.fromkeys(str(reason) for each in found for reason in each.judgement.reasons)
    return "; ".join(reasons) or "converts"


def _families(each: Judged) -> str:
    return "; ".join(map(str, each.runners))
