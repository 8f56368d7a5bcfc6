"""What can be switched off by $PARALLEL_DIT_OFF, to find out whether it is to blame: words with commas in between."""

from __future__ import annotations

import os

from .errors import ConfigurationError

VARIABLE = "PARALLEL_DIT_OFF"
SWITCHES = (
    "passes", "recordings", "peers", "host", "gather", "blocks", "quantised", "sent", "modulation", "unets", "ahead",
)  # fmt: skip
"""Our changes to compiled graphs; CUDA graphs of whole forwards; exchange through the peers' memory; exchange
through the host's memory, where GPUs do not reach each other's (NCCL stays for both), and in it the inputs of a
block's layers instead of what they make; in blocks of ComfyUI's networks,
norms and feed-forward layers as parts of that exchange, and quantised layers as operators of a
graph; what a forward sends from the host or reads, in recordings; modulation layers of ComfyUI's networks that ranks
share out, before the blocks; channels side by side in U-Nets; loops of the next prompt, while a picture is saved."""


def is_on(what: str) -> bool:
    """Whether one of SWITCHES is left on; ConfigurationError where the variable holds a word that is none of them."""
    off = {word.strip() for word in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := sorted(off.difference(SWITCHES)):
        cause = "{variable} holds {unknown}, which cannot be switched off."
        fix = "Use some of {switches}, with commas in between."
        known, words = ", ".join(SWITCHES), ", ".join(unknown)
        raise ConfigurationError(cause, fix, variable=VARIABLE, unknown=words, switches=known)
    return what not in off
