"""The picture of an example in the template browser: its name, its use, and a drawing of that by the model of emoji."""

from __future__ import annotations

import colorsys
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.emoji.drawing import Artist

_SIZE = (800, 800)
_LEFT, _TOP, _WIDTH, _HEIGHT = 45, 330, 710, 420
"""Of the drawing."""
_EDGE = 12

Scene = tuple[str, tuple[str, ...]]
"""How, a key of `_WAYS`, and the words of its pictures."""
SCENES: Mapping[str, Scene] = {
    "parallel-flux-dev-two-gpus": ("halves", ("red apple",)),
    "flux-dev-parallel-sampler": ("steps", ("sunflower",)),
    "parallel-flux-dev-pipefusion": ("bands", ("hamburger",)),
    "parallel-flux-kontext-edit": ("change", ("dog face", "fox face")),
    "parallel-flux-lora": ("change", ("grinning face", "smiling face with sunglasses")),
    "parallel-ltx-2-video-with-sound": ("sounding", ("honeybee",)),
    "parallel-minimax-h3-video-with-sound": ("sounding", ("spouting whale",)),
    "parallel-qwen-image-edit": ("change", ("lemon", "strawberry")),
    "parallel-sdxl-checkpoint": ("steps", ("snowman without snow",)),
    "parallel-wan-2.2-two-experts": ("film", ("sailboat",)),
    "parallel-wan-text-to-video": ("film", ("rocket",)),
    "parallel-z-image-turbo": ("steps", ("butterfly",)),
}
"""Of each example."""


def draw_card(artist: Artist, scene: Scene, title: str, use: str, path: Path) -> None:
    """Write it as JPEG."""
    hue = zlib.crc32(f"{title} {use}".encode()) % 360 / 360
    dark, light = (_colour(hue + turn, 0.55, value) for turn, value in ((0, 0.16), (0.08, 0.42)))
    card = Image.linear_gradient("L").resize(_SIZE)
    card = Image.composite(Image.new("RGB", _SIZE, light), Image.new("RGB", _SIZE, dark), card)
    pen = ImageDraw.Draw(card)
    pen.text((45, 90), title, font=ImageFont.load_default(88), fill="white")
    pen.text((47, 205), use, font=ImageFont.load_default(38), fill=(230, 230, 230))
    how, words = scene
    pictures = [
        Image.fromarray((each * 255).byte().permute(1, 2, 0).numpy()).resize(
            (_HEIGHT, _HEIGHT), Image.Resampling.LANCZOS
        )
        for each in artist.draw(words)
    ]
    _WAYS[how](card, pictures, _colour(hue + 0.5, 0.6, 1.0))
    card.save(path, quality=85)


def _halves(card: Image.Image, pictures: Sequence[Image.Image], accent: tuple[int, int, int]) -> None:
    """One picture, half of it by each of two GPUs."""
    left = _LEFT + (_WIDTH - _HEIGHT) // 2
    _put(card, pictures[0], left, _TOP)
    pen, middle, right = ImageDraw.Draw(card), _TOP + _HEIGHT // 2, left + _HEIGHT
    pen.line((left - 30, middle, right + 30, middle), fill=accent, width=4)
    for row, name in enumerate(("GPU 1", "GPU 2")):
        pen.text(
            (right + 18, _TOP + _HEIGHT * (1 + 2 * row) // 4 - 16), name, font=ImageFont.load_default(30), fill=accent
        )


def _bands(card: Image.Image, pictures: Sequence[Image.Image], accent: tuple[int, int, int]) -> None:
    """A picture whose bands go one behind the other."""
    height = _HEIGHT // 4
    for band in range(4):
        cut = pictures[0].crop((0, band * height, _HEIGHT, (band + 1) * height - 8))
        left = _LEFT + (_WIDTH - _HEIGHT) * (3 - band) // 3
        card.paste(cut, (left, _TOP + band * height))
        ImageDraw.Draw(card).line(
            (left, _TOP + band * height, left, _TOP + (band + 1) * height - 9), fill=accent, width=8
        )


def _change(card: Image.Image, pictures: Sequence[Image.Image], accent: tuple[int, int, int]) -> None:
    """Before and after."""
    side = (_WIDTH - 90) // 2
    top = _TOP + (_HEIGHT - side) // 2
    for place, picture in enumerate(pictures):
        _put(card, picture.resize((side, side)), _LEFT + place * (side + 90), top)
    start, middle = _LEFT + side + 18, top + side // 2
    pen = ImageDraw.Draw(card)
    pen.line((start, middle, start + 36, middle), fill=accent, width=10)
    pen.polygon([(start + 30, middle - 22), (start + 58, middle), (start + 30, middle + 22)], fill=accent)


def _steps(card: Image.Image, pictures: Sequence[Image.Image], accent: tuple[int, int, int]) -> None:
    """From noise to the picture."""
    side = _HEIGHT // 2
    noise = Image.effect_noise((side // 4, side // 4), 160).resize((side, side)).convert("RGB")
    small = pictures[0].resize((side, side))
    for step, share in enumerate((0.85, 0.6, 0.35)):
        _put(card, Image.blend(small, noise, share), _LEFT + step * 75, _TOP + step * (side // 2))
    _put(card, pictures[0], _LEFT + _WIDTH - _HEIGHT, _TOP)


def _film(
    card: Image.Image, pictures: Sequence[Image.Image], accent: tuple[int, int, int], top: int = _TOP + 85
) -> None:
    """Frames in which it moves."""
    side = (_WIDTH - 4 * _EDGE) // 3
    pen = ImageDraw.Draw(card)
    pen.rectangle((0, top - 44, _SIZE[0], top + side + 44), fill=(18, 18, 22))
    for hole in range(12, _SIZE[0], 48):
        for row in (top - 34, top + side + 12):
            pen.rounded_rectangle((hole, row, hole + 24, row + 22), 5, fill=accent)
    small = pictures[0].resize((side * 3 // 4, side * 3 // 4))
    for frame in range(3):
        picture = Image.new("RGB", (side, side), "white")
        picture.paste(small, (side * frame // 8, side * (2 - frame) // 8))
        _put(card, picture, _LEFT + _EDGE + frame * (side + _EDGE), top)


def _sounding(card: Image.Image, pictures: Sequence[Image.Image], accent: tuple[int, int, int]) -> None:
    """A film with its sound."""
    _film(card, pictures, accent, _TOP + 45)
    pen, loudness = ImageDraw.Draw(card), random.Random(0)
    for place in range(_LEFT, _LEFT + _WIDTH, 14):
        half = loudness.randint(4, 42)
        pen.line((place, 705 - half, place, 705 + half), fill=accent, width=6)


_WAYS: Mapping[str, Callable[[Image.Image, Sequence[Image.Image], tuple[int, int, int]], None]] = {
    "halves": _halves,
    "bands": _bands,
    "change": _change,
    "steps": _steps,
    "film": _film,
    "sounding": _sounding,
}


def _put(card: Image.Image, picture: Image.Image, left: int, top: int) -> None:
    corners = Image.new("L", picture.size)
    ImageDraw.Draw(corners).rounded_rectangle((0, 0, picture.width - 1, picture.height - 1), 18, fill=255)
    card.paste(picture, (left, top), corners)


def _colour(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)
