"""Judgements of all templates, and their totals by template and by use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .file_names import Runner, find_runner
from .installed import Template
from .judgement import Judgement, judge, run_kinds
from .loops import step_reasons
from .newer import NEWEST_RUN, lacking
from .prompt_graph import read_prompt


@dataclass(frozen=True)
class Judged:
    """A template that samples with a local diffusion model.

    Args:
        steps: why loops of it go step by step.
        lacks: what the newest ComfyUI that was run has not of it.
    """

    name: str
    usage: int
    judgement: Judgement
    steps: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def runners(self) -> list[Runner]:
        """What runs its files."""
        return list(dict.fromkeys(map(find_runner, self.judgement.files)))

    @property
    def tokens_split(self) -> bool:
        """Ranks share out the tokens of one picture for each of its files."""
        return all(runner.tokens_split for runner in self.runners)

    @property
    def loops_in_pool(self) -> bool:
        """All of its loops run in the pool."""
        return self.judgement.converts and not self.steps

    @property
    def status(self) -> str:
        """One word or two."""
        if self.lacks:
            return "newer"
        return "converts" if self.judgement.converts else "not yet"

    @property
    def why(self) -> str:
        """The first reason; "" where it converts."""
        return "" if self.judgement.first is None else str(self.judgement.first)

    def as_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "usage": self.usage,
            "status": self.status,
            "why": self.why,
            "reasons": [str(reason) for reason in self.judgement.reasons],
            "files": list(self.judgement.files),
            "runners": [str(runner) for runner in self.runners],
            "tokens_split": self.tokens_split,
            "loop": "pool" if self.loops_in_pool else "steps",
            "steps": list(self.steps),
            "lacks": list(self.lacks),
        }


@dataclass(frozen=True)
class Total:
    """How many templates, and how much of the use."""

    templates: int
    usage: int

    def of(self, whole: Total) -> str:
        """As a share of a whole."""
        share = 100 * self.usage / whole.usage if whole.usage else 0.0
        return f"{self.templates} of {whole.templates} templates, {share:.1f} % of use"


def judge_all(templates: Iterable[Template]) -> list[Judged]:
    """Those that sample with a local diffusion model, in the order given."""
    found = ((each, prompt, judge(prompt)) for each in templates for prompt in [read_prompt(each.workflow)])
    return [
        Judged(each.name, each.usage, judgement, step_reasons(prompt), lacking(run_kinds(prompt), judgement.files))
        for each, prompt, judgement in found
        if judgement is not None
    ]


def total(judged: Sequence[Judged], holds: Callable[[Judged], bool] = lambda each: True) -> Total:
    """Of those for which something holds."""
    chosen = [each for each in judged if holds(each)]
    return Total(len(chosen), sum(each.usage for each in chosen))


def total_lines(judged: Sequence[Judged]) -> list[tuple[str, str]]:
    """(what, how many) for the end of the report."""
    here = known_here(judged)
    whole = total(here)
    now = [each for each in here if each.judgement.converts]
    return [
        (f"have all their nodes and networks in ComfyUI {NEWEST_RUN}", whole.of(total(judged))),
        ("of these, convert now", total(now).of(whole)),
        ("of these, one picture's tokens are shared out", total(now, lambda each: each.tokens_split).of(whole)),
        ("of these, all loops run in the pool", total(now, lambda each: each.loops_in_pool).of(whole)),
    ]


def known_here(judged: Sequence[Judged]) -> list[Judged]:
    """Those of which the newest ComfyUI that was run lacks nothing."""
    return [each for each in judged if not each.lacks]


def lack_totals(judged: Sequence[Judged]) -> list[tuple[tuple[str, ...], list[Judged]]]:
    """(what is missing, templates that lack just that), most used first."""
    lacking: dict[tuple[str, ...], list[Judged]] = {}
    for each in judged:
        if each.lacks:
            lacking.setdefault(each.lacks, []).append(each)
    return sorted(lacking.items(), key=lambda pair: -total(pair[1]).usage)


def reason_totals(judged: Sequence[Judged]) -> list[tuple[str, Total]]:
    """(first reason, templates that it stops), most used first; of what the newest ComfyUI that was run has."""
    stopped: dict[str, list[Judged]] = {}
    for each in known_here(judged):
        if each.judgement.first is not None:
            stopped.setdefault(str(each.judgement.first), []).append(each)
    return sorted(((reason, total(found)) for reason, found in stopped.items()), key=lambda pair: -pair[1].usage)


def step_totals(judged: Sequence[Judged]) -> list[tuple[str, Total]]:
    """(why loops go step by step, templates that have it, whatever else they have), most used first; likewise."""
    having: dict[str, list[Judged]] = {}
    for each in known_here(judged):
        for reason in each.steps if each.judgement.converts else ():
            having.setdefault(reason, []).append(each)
    return sorted(((reason, total(found)) for reason, found in having.items()), key=lambda pair: -pair[1].usage)
