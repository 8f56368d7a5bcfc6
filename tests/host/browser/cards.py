"""The picture of an example in the template browser: its name, its use, and its graph with our loaders in colour."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

_SIZE = (800, 800)
_GRAPH = (45, 350, 755, 755)


def draw_card(saved: Mapping[str, Any], title: str, use: str, path: Path) -> None:
    """Write it as JPEG."""
    hue = zlib.crc32(f"{title} {use}".encode()) % 360 / 360
    dark, light = (_colour(hue + turn, 0.55, value) for turn, value in ((0, 0.16), (0.08, 0.42)))
    card = Image.linear_gradient("L").resize(_SIZE)
    card = Image.composite(Image.new("RGB", _SIZE, light), Image.new("RGB", _SIZE, dark), card)
    pen = ImageDraw.Draw(card)
    pen.text((45, 110), title, font=ImageFont.load_default(88), fill="white")
    pen.text((47, 225), use, font=ImageFont.load_default(38), fill=(230, 230, 230))
    _draw_graph(pen, saved, _colour(hue + 0.5, 0.6, 1.0))
    card.save(path, quality=85)


def _draw_graph(pen: ImageDraw.ImageDraw, saved: Mapping[str, Any], accent: tuple[int, int, int]) -> None:
    nodes = {node["id"]: node for node in saved["nodes"] if node["type"] != "MarkdownNote"}
    corners = [
        (node["pos"][0], node["pos"][1], *(map(sum, zip(node["pos"], node["size"], strict=True))))
        for node in nodes.values()
    ]
    left, top = (min(corner[axis] for corner in corners) for axis in (0, 1))
    right, bottom = (max(corner[axis] for corner in corners) for axis in (2, 3))
    scale = min((_GRAPH[2] - _GRAPH[0]) / (right - left), (_GRAPH[3] - _GRAPH[1]) / (bottom - top))

    def place(x: float, y: float) -> tuple[float, float]:
        return _GRAPH[0] + (x - left) * scale, _GRAPH[1] + (y - top) * scale

    for _, origin, slot, target, index, kind in saved["links"]:
        start, end = nodes[origin], nodes[target]
        line = [
            place(start["pos"][0] + start["size"][0], start["pos"][1] + 15 + 20 * slot),
            place(end["pos"][0], end["pos"][1] + 15 + 20 * index),
        ]
        pen.line(line, fill=accent if kind == "MODEL" else (150, 150, 160), width=4 if kind == "MODEL" else 2)
    for node in nodes.values():
        ours = node["type"].startswith("Parallel")
        box = [*place(*node["pos"]), *place(node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1])]
        pen.rounded_rectangle(box, 6, fill=accent if ours else (38, 38, 44), outline=(110, 110, 120), width=2)


def _colour(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)
