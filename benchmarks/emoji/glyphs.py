"""The pictures that the model learns, drawn from a colour font, and the words by which it knows them."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

SIZE = 128
"""Pixels of a picture's side."""
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
"""Where Debian's package fonts-noto-color-emoji has it."""
_STRIKE = 109
"""The one size that the font's bitmaps have."""
_ROOM = 6
"""Pixels of white around a picture, at least."""
LEARNED = (
    "red apple", "banana", "cherries", "strawberry", "watermelon", "tangerine", "grapes", "pineapple", "hamburger",
    "slice of pizza", "doughnut", "cookie", "shortcake", "soft ice cream", "hot beverage", "beer mug",
    "black sun with rays", "umbrella", "white medium star", "rainbow", "evergreen tree", "palm tree", "cactus",
    "tulip", "sunflower", "four leaf clover", "mushroom", "maple leaf", "aubergine", "lemon", "carrot",
    "snowman without snow",
    "dog face", "cat face", "pig face", "panda face", "frog face", "penguin", "octopus", "tropical fish", "turtle",
    "snail", "lady beetle", "honeybee", "butterfly", "elephant", "bird", "front-facing baby chick", "spouting whale",
    "fox face", "lion face", "owl", "smiling face with sunglasses", "crying face", "pouting face", "grinning face",
    "rocket", "automobile", "bus", "sailboat", "helicopter", "fire engine", "balloon", "jack-o-lantern",
)  # fmt: skip
"""Unicode's names of food, weather, plants, animals, faces and vehicles that one tells apart at a glance."""
_FILLING = frozenset({"with", "and", "of", "the", "for", "symbol", "sign"})
"""Words of Unicode's names that tell one picture from no other."""


def words_of(prompt: str) -> tuple[str, ...]:
    """The words of a prompt that count, in its order."""
    words = prompt.lower().replace("-", " ").replace(",", " ").split()
    return tuple(word for word in words if word not in _FILLING) or tuple(words)


def names() -> dict[str, tuple[str, ...]]:
    """Each emoji that is learned -> the words of its name."""
    return {unicodedata.lookup(name): words_of(name) for name in LEARNED}


def draw(characters: list[str], font: Path = FONT) -> torch.Tensor:
    """Their pictures on white.

    Returns:
        (N, 3, SIZE, SIZE) uint8.

    Raises:
        OSError: the font is not there, or has no colours of this size.
    """
    loaded = ImageFont.truetype(str(font), _STRIKE)
    return torch.stack([_draw_one(character, loaded) for character in characters])


def _draw_one(character: str, font: ImageFont.FreeTypeFont) -> torch.Tensor:
    sheet = Image.new("RGB", (2 * SIZE, 2 * SIZE), "white")
    ImageDraw.Draw(sheet).text((40, 40), character, font=font, embedded_color=True)
    box = Image.eval(sheet.convert("L"), lambda value: 255 - value).getbbox()
    if box is None:
        raise OSError(f"The font has no picture of U+{ord(character):04X}.")
    glyph = sheet.crop(box)
    glyph.thumbnail((SIZE - 2 * _ROOM, SIZE - 2 * _ROOM), Image.Resampling.LANCZOS)
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    picture.paste(glyph, ((SIZE - glyph.width) // 2, (SIZE - glyph.height) // 2))
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)
