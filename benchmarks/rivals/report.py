"""What compare.py shows: the table, the machine, the plot."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .case import RIVALS, Rival
from .schedule import Turn

DETAILS = (
    "",
    "GPUs",
    "size",
    "steps",
    "ms per step",
    "s for them",
    "distance",
    "to",
    "first step s",
    "weights GiB",
    "peak GiB",
    "settings",
)
PACKAGES = ("torch", "diffusers", "xfuser", "yunchang", "triton", "flash-attn")
NOTE = """ms per step: of a whole run, divided by its steps; nobody is made to wait between its steps. Where it says
picture, a run is a whole picture, with the pipeline's exact first step in it. Cases of fewer GPUs than the machine has
ran beside each other on other GPUs, unless they exchanged through the host's memory. Random weights, the same for all;
FLUX.1-dev's size (on a CPU a tiny model, in which nothing is compiled). Distance: of the final latent to the
reference's after as many steps, relative; "≠" marks an output that does not agree, "~" a pipeline's, which differs by
design. First step: with what is compiled or measured then. GiB: what PyTorch allocated on the fullest GPU, with the
weights alone and at most while sampling."""


def describe_machine(rows: list[dict[str, Any]], comfyui: str) -> dict[str, Any]:
    """Devices, versions and date of a run; `text` has them in one line."""
    devices = {row["device"] for row in rows if "device" in row}
    count = f"{torch.cuda.device_count()} x " if torch.cuda.is_available() else ""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if version := _comfyui_version(comfyui):
        versions["ComfyUI"] = version
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    machine = {"device": count + ", ".join(sorted(devices)), "versions": versions, "date": date}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {**machine, "text": f"{machine['device']}; {told}; {date}"}


def _comfyui_version(folder: str) -> str:
    file = Path(folder or ".").expanduser() / "comfyui_version.py"
    found = re.search(r'__version__ = "([^"]+)"', file.read_text()) if file.is_file() else None
    return found[1] if found else ""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: ms per step by rival, GPUs and size; then every row with its distance; then what has no number."""
    reasons = list(dict.fromkeys(f"{_title(row)}: {row['reason']}" for row in rows if "reason" in row))
    places = sorted({(row["size"], row["ranks"]) for row in rows})
    lines = [
        "| ms per step | " + " | ".join(f"{size}², {ranks} GPU{'s' * (ranks > 1)}" for size, ranks in places) + " |"
    ]
    lines.append("|---" * (len(places) + 1) + "|")
    for name in dict.fromkeys(row["rival"] for row in rows):
        own = {(row["size"], row["ranks"]): row for row in rows if row["rival"] == name}
        cells = [_cell(own[place], reasons) if place in own else "–" for place in places]
        lines.append(f"| {_rival(name).title} | " + " | ".join(cells) + " |")
    lines += ["", "| " + " | ".join(DETAILS) + " |", "|---" * len(DETAILS) + "|"]
    lines += [_details(row) for row in rows if "reason" not in row]
    if reasons:
        lines += ["", "Not here, because"]
        lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", NOTE])


def _rival(name: str) -> Rival:
    return RIVALS.get(name, Rival(name, ""))


def _title(row: dict[str, Any]) -> str:
    return _rival(row["rival"]).title


def _cell(row: dict[str, Any], reasons: list[str]) -> str:
    if "reason" in row:
        return f"({1 + reasons.index(_title(row) + ': ' + row['reason'])})"
    return f"{row['ms_per_step']:.1f}" + ("" if row["agrees"] else f" ≠ ({row['distance']:.2g})")


def _details(row: dict[str, Any]) -> str:
    mark = " ≠" if not row["agrees"] else " ~" if row["pipelined"] else ""
    name, ranks = row["reference"]
    cells = [
        _title(row),
        str(row["ranks"]),
        str(row["size"]),
        f"{row['steps']}" + " (picture)" * _rival(row["rival"]).picture,
        f"{row['ms_per_step']:.1f}",
        f"{row['ms_per_step'] * row['steps'] / 1000:.2f}",
        f"{row['distance']:.2g}{mark}",
        f"{name} on {ranks}",
        f"{row['first_step_s']:.1f}",
        _gib(row.get("weights_gib")),
        _gib(row["peak_gib"]),
        row["settings"],
    ]
    return "| " + " | ".join(cells) + " |"


def _gib(amount: float | None) -> str:
    return "" if amount is None else f"{amount:.1f}"


def show_plan(turns: Sequence[Turn], ends: Sequence[float]) -> str:
    """Every turn with its estimated seconds, and when it ends; then the total."""
    lines = [
        f"{turn.case.rival:24} {turn.case.ranks} GPUs {turn.case.size:5} {turn.case.warm + turn.case.steps:3} steps "
        f"{turn.seconds:5.0f} s, until {end:5.0f} s" + ", alone" * (turn.width > turn.case.ranks)
        for turn, end in zip(turns, ends, strict=True)
    ]
    return "\n".join([*lines, f"{len(turns)} cases, about {max(ends, default=0):.0f} s"])


def merge(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier run that were not measured again, then these; a reason replaces no number."""
    measured = {_identity(row): row for row in before if "reason" not in row}
    new = [measured[_identity(row)] if "reason" in row and _identity(row) in measured else row for row in rows]
    again = {_identity(row) for row in new}
    return [*(row for row in before if _identity(row) not in again), *new]


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["rival"], row["ranks"], row["size"], row.get("p2p", True)


def write(rows: list[dict[str, Any]], machine: dict[str, Any], path: Path) -> None:
    """Write the rows as JSON to `path`, and the table beside it as .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    path.with_suffix(".md").write_text(f"{machine['text']}\n\n{table(rows)}\n")


def plot(rows: list[dict[str, Any]], path: Path) -> str:
    """Draw a group of bars per size and number of GPUs; return what came of it in words."""
    try:
        import matplotlib
    except ImportError:
        return "No plot, because matplotlib is not installed; `--plot compare.json` draws it where it is."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {(row["size"], row["ranks"], row["rival"]): row["ms_per_step"] for row in rows if "reason" not in row}
    if not measured:
        return "No plot, because nothing was measured."
    sizes = sorted({size for size, _, _ in measured})
    names = [name for name in dict.fromkeys(row["rival"] for row in rows) if any(name == key[2] for key in measured)]
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4.5), squeeze=False, layout="constrained")
    colors = {name: f"C{place}" for place, name in enumerate(names)}
    for axis, size in zip(axes[0], sizes, strict=True):
        counts = sorted({ranks for key, ranks, _ in measured if key == size})
        shown = [name for name in names if any((size, ranks, name) in measured for ranks in counts)]
        width = 0.8 / len(shown)
        for place, name in enumerate(shown):
            given = [
                (at, measured[size, ranks, name]) for at, ranks in enumerate(counts) if (size, ranks, name) in measured
            ]
            places = [at + (place - (len(shown) - 1) / 2) * width for at, _ in given]
            bars = axis.bar(places, [ms for _, ms in given], width, color=colors[name])
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_xticks(range(len(counts)), [f"{count} GPU{'s' * (count > 1)}" for count in counts])
        axis.set_xlim(-0.6, len(counts) - 0.4)
        axis.set(title=f"{size} × {size}", ylabel="ms per step")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    figure.legend(handles, [_rival(name).title for name in names], loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)
    return f"Plot: {path}"
