"""Words as a FLUX's conditioning: a row of a learned table each, and their mean as the pooled text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .glyphs import LEARNED, words_of

WIDTH = 64
"""Of a word."""
LENGTH = 8
"""Words of a prompt; the rows behind its last one are zero."""


class UnknownWordError(ValueError):
    """A prompt has a word that the model never saw."""


class Words:
    """The table.

    Args:
        vocabulary: in the order of its rows.
        table: (V, WIDTH).
    """

    def __init__(self, vocabulary: Sequence[str], table: torch.Tensor):
        self.vocabulary = list(vocabulary)
        self.table = table
        self._rows = {word: row for row, word in enumerate(vocabulary)}

    @classmethod
    def read(cls, path: Path) -> Words:
        """What `save` wrote."""
        with safe_open(path, "pt") as file:
            return cls(json.loads(file.metadata()["vocabulary"]), file.get_tensor("words").float())

    def save(self, path: Path) -> None:
        """Write the table in bfloat16, with the words in the file's metadata."""
        table = self.table.detach().bfloat16().cpu().contiguous()
        save_file({"words": table}, path, metadata={"vocabulary": json.dumps(self.vocabulary)})

    def rows(self, words: Iterable[str]) -> torch.Tensor:
        """(LENGTH,) int64: the words' rows, -1 behind the last one.

        Raises:
            UnknownWordError: a word that the table lacks, or too many.
        """
        chosen = list(words)
        unknown = [word for word in chosen if word not in self._rows]
        if unknown or len(chosen) > LENGTH:
            raise UnknownWordError(
                f"The model does not know {', '.join(unknown)}. It draws: {', '.join(LEARNED)}."
                if unknown
                else f"A prompt may have {LENGTH} words."
            )
        rows = [self._rows[word] for word in chosen]
        return torch.tensor(rows + [-1] * (LENGTH - len(rows)))

    def conditioning(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Context (1, LENGTH, WIDTH) and pooled text (1, WIDTH) of a prompt.

        Raises:
            UnknownWordError: see `rows`.
        """
        return embed(self.rows(words_of(prompt))[None], self.table)


def embed(rows: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Context (B, LENGTH, WIDTH) and pooled text (B, WIDTH) of rows (B, LENGTH), -1 for none."""
    there = (rows >= 0)[..., None]
    context = torch.where(there, table[rows.clamp(min=0)], 0.0)
    return context, context.sum(1) / there.sum(1).clamp(min=1)
