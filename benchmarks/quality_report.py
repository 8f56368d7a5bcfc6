"""What benchmarks/pipefusion_quality.py found, as JSON, as tables, as a plot, and as the pictures themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

_SHOWN = 8
_WIDEST = 720
"""Pixels of the picture of pictures."""
_NOTE = """M patches, W warm-up steps. PSNR in dB / SSIM, beside the same model's exact run; the peak of a PSNR is the
range of the exact latent or picture. *Blind*: patches that see the text and themselves but not one another, W = 1:
that is what stale keys and values are there to prevent, and the scale for the other columns."""


def table(result: dict[str, Any]) -> str:
    """One subject's results as markdown."""
    warmups = sorted({row["warmup"] for row in result["grid"]})
    changes = result["change_per_step"]
    lines = [
        f"## {result['title'][0].upper()}{result['title'][1:]}",
        "",
        f"{result['tokens']} image tokens, {result['pictures']} picture(s). From one step to the next, keys and values "
        f"change by {min(changes):.0%} to {max(changes):.0%}.",
    ]
    for name in ("latent", "picture"):
        columns = [*(f"W = {warmup}" for warmup in warmups), "blind"]
        lines += ["", f"| {name} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for patches in sorted({row["patches"] for row in result["grid"]}):
            rows = [row for row in (*result["grid"], *result["blind"]) if row["patches"] == patches]
            lines.append(f"| M = {patches} | {' | '.join(_cell(row, name) for row in rows)} |")
    lines += ["", f"| M = 4, W = 1, of | {' | '.join(str(row['steps']) + ' steps' for row in result['lengths'])} |"]
    lines.append("|---|" + "---|" * len(result["lengths"]))
    for name in ("latent", "picture"):
        lines.append(f"| {name} | {' | '.join(_cell(row, name) for row in result['lengths'])} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], name: str) -> str:
    return f"{row[f'{name}_psnr']:.1f} / {row[f'{name}_ssim']:.4f}"


def write_report(folder: Path, run: str, results: list[dict[str, Any]], pictures: dict[str, torch.Tensor]) -> None:
    """Write pipefusion_quality.json, .md and .png, and the last subject's pictures to pipefusion_pictures.png."""
    path = folder / "pipefusion_quality.json"
    path.write_text(json.dumps({"run": run, "results": results}, indent=1) + "\n", encoding="utf-8")
    text = "\n\n".join(["# PipeFusion's pictures beside one GPU's", run, _NOTE, *map(table, results)])
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    plot(results, path.with_suffix(".png"))
    show(pictures, folder / "pipefusion_pictures.png")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """PSNR over patches, a line for each number of warm-up steps; latents above, pictures below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = 4.2 * len(results), 6.4
    figure, panels = pyplot.subplots(2, len(results), figsize=size, sharex=True, sharey="row", squeeze=False)
    for column, result in enumerate(results):
        for row, name in enumerate(("latent", "picture")):
            _draw_lines(panels[row][column], result, name)
        panels[0][column].set_title(result["title"], fontsize=10)
        panels[1][column].set_xlabel("patches")
    for row, name in enumerate(("latent", "picture")):
        panels[row][0].set_ylabel(f"PSNR of the {name}, dB")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _draw_lines(panel: Any, result: dict[str, Any], name: str) -> None:
    for warmup in sorted({row["warmup"] for row in result["grid"]}):
        rows = [row for row in result["grid"] if row["warmup"] == warmup]
        values = [row[f"{name}_psnr"] for row in rows]
        panel.plot([row["patches"] for row in rows], values, marker="o", markersize=3, label=f"warm-up {warmup}")
    values = [row[f"{name}_psnr"] for row in result["blind"]]
    panel.plot([row["patches"] for row in result["blind"]], values, color="grey", linestyle="--", label="blind")
    panel.grid(alpha=0.3)


def show(pictures: dict[str, torch.Tensor], path: Path) -> None:
    """Some of the pictures, a row for each schedule in the order of the dictionary."""
    rows = [each[:: -(-len(each) // _SHOWN)] for each in pictures.values()]
    whole = torch.cat([torch.cat(list(each), dim=2) for each in rows], dim=1).float().cpu()
    low, high = whole.min(), whole.max()
    levels = ((whole - low) / (high - low) * 255).byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(levels)
    picture.thumbnail((_WIDEST, _WIDEST))
    picture.save(path)
