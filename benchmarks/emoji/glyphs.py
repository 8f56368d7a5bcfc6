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
_RANGES = (
    (0x2600, 0x2604), (0x2614, 0x2616), (0x26C4, 0x26C5), (0x2B50, 0x2B51), (0x1F300, 0x1F321), (0x1F32D, 0x1F380),
    (0x1F400, 0x1F43F), (0x1F600, 0x1F641), (0x1F680, 0x1F6A5), (0x1F950, 0x1F970), (0x1F980, 0x1F9AF),
    (0x1F9C0, 0x1F9CC),
)  # fmt: skip
"""Weather, food, plants, animals, faces and vehicles."""
_FILLING = frozenset({"with", "and", "of", "the", "for", "symbol", "sign"})
"""Words of Unicode's names that tell one picture from no other."""


def words_of(prompt: str) -> tuple[str, ...]:
    """The words of a prompt that count, in its order."""
    words = prompt.lower().replace("-", " ").replace(",", " ").split()
    return tuple(word for word in words if word not in _FILLING) or tuple(words)


def names() -> dict[str, tuple[str, ...]]:
    """Each emoji that is learned -> the words of its name."""
    characters = [chr(code) for begin, end in _RANGES for code in range(begin, end)]
    named = {character: unicodedata.name(character, "") for character in characters}
    return {character: words_of(name) for character, name in named.items() if name}


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
