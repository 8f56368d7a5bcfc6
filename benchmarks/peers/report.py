"""What compare.py shows: the table, the machine, the plot."""

from __future__ import annotations

import datetime
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .case import PEERS, Peer

PACKAGES = ("torch", "diffusers", "xfuser", "yunchang", "triton", "flash-attn")
NOTE = """ms per step, median; every step is waited for, as a sampler with a live preview does. Random weights, the same
for all; FLUX.1-dev's size (on a CPU a tiny model, in which nothing is compiled). Distance: of the final latent to the
reference's, relative; "≠" marks an output that does not agree. First step: with what is compiled or measured then."""


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
    """Markdown: ms per step by peer, GPUs and size; then every row with its distance; then what has no number."""
    reasons = list(dict.fromkeys(f"{_title(row)}: {row['reason']}" for row in rows if "reason" in row))
    places = sorted({(row["size"], row["ranks"]) for row in rows})
    lines = [
        "| ms per step | " + " | ".join(f"{size}², {ranks} GPU{'s' * (ranks > 1)}" for size, ranks in places) + " |"
    ]
    lines.append("|---" * (len(places) + 1) + "|")
    for name in dict.fromkeys(row["peer"] for row in rows):
        own = {(row["size"], row["ranks"]): row for row in rows if row["peer"] == name}
        cells = [_cell(own[place], reasons) if place in own else "–" for place in places]
        lines.append(f"| {_peer(name).title} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| | GPUs | size | ms per step | distance | to | first step s | peak GiB | settings |",
        "|---" * 9 + "|",
    ]
    lines += [_details(row) for row in rows if "reason" not in row]
    if reasons:
        lines += ["", "Not here, because"]
        lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", NOTE])


def _peer(name: str) -> Peer:
    return PEERS.get(name, Peer(name, ""))


def _title(row: dict[str, Any]) -> str:
    return _peer(row["peer"]).title


def _cell(row: dict[str, Any], reasons: list[str]) -> str:
    if "reason" in row:
        return f"({1 + reasons.index(_title(row) + ': ' + row['reason'])})"
    return f"{row['ms_per_step']:.1f}" + ("" if row["agrees"] else f" ≠ ({row['distance']:.2g})")


def _details(row: dict[str, Any]) -> str:
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    mark = "" if row["agrees"] else " ≠"
    name, ranks = row["reference"]
    return (
        f"| {_title(row)} | {row['ranks']} | {row['size']} | {row['ms_per_step']:.1f} | {row['distance']:.2g}{mark} | "
        f"{name} on {ranks} | {row['first_step_s']:.1f} | {peak} | {row['settings']} |"
    )


def write(rows: list[dict[str, Any]], machine: dict[str, Any], out: Path) -> None:
    """Write compare.json and compare.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    (out / "compare.md").write_text(f"{machine['text']}\n\n{table(rows)}\n")


def plot(rows: list[dict[str, Any]], path: Path) -> str:
    """Draw a group of bars per size and number of GPUs; return what came of it in words."""
    try:
        import matplotlib
    except ImportError:
        return "No plot, because matplotlib is not installed; `--plot compare.json` draws it where it is."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {(row["size"], row["ranks"], row["peer"]): row["ms_per_step"] for row in rows if "reason" not in row}
    if not measured:
        return "No plot, because nothing was measured."
    sizes = sorted({size for size, _, _ in measured})
    names = [name for name in dict.fromkeys(row["peer"] for row in rows) if any(name == key[2] for key in measured)]
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4.5), squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        counts = sorted({ranks for key, ranks, _ in measured if key == size})
        for place, name in enumerate(names):
            given = [
                (at, measured[size, ranks, name]) for at, ranks in enumerate(counts) if (size, ranks, name) in measured
            ]
            width = 0.8 / len(names)
            bars = axis.bar(
                [at + (place - (len(names) - 1) / 2) * width for at, _ in given], [ms for _, ms in given], width
            )
            bars.set_label(_peer(name).title)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_xticks(range(len(counts)), [f"{count} GPU{'s' * (count > 1)}" for count in counts])
        axis.set(title=f"{size} × {size}", ylabel="ms per step")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return f"Plot: {path}"
