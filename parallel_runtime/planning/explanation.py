"""What a plan does and why, for the artist: one paragraph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..config import AXES, FASTER, ParallelConfig, ParallelPlan
from ..requests.facts import GIB, LinkFacts, MachineFacts, ModelFacts, RequestFacts
from ..requests.plan_details import PlanDetails
from .coming_blocks import Coming
from .cost import Cost
from .plan import Choice, choose
from .weights_choice import ways_out


def explain(
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None = None,
) -> str:
    """Return the plan, why, what it is predicted to take, and what more GPUs would give; arguments as `resolve_plan`.

    Raises:
        ConfigurationError: see `check_limits`.
    """
    choice = choose(config, ranks, model, request, machine, loaded)
    sentences = [_what(choice, model, request)]
    if choice.reason:
        sentences.append(_why_pipe(choice, machine))
    coming = Coming.of(config, ranks)
    if coming is not None:
        sentences.append(_coming(choice, coming, model, machine))
    if not model.splits_sequence:
        sentences.append(
            f"{model.title} is a U-Net, which is not split inside of a picture: ranks share out CFG branches and the "
            "pictures of a batch."
        )
    if machine.is_crowded:
        has, free = machine.memory_bytes / GIB, machine.free_bytes / GIB
        sentences.append(f"Of a GPU's {has:.1f} GiB only {free:.1f} are free, and the plan reckons with these.")
    predictable = _predictable(model, machine)
    if predictable:
        sentences += _predicted(choice, machine, ranks)
        if machine.usable_bytes and choice.cost.bytes > machine.usable_bytes:
            weight_bytes = model.parameters * model.bytes_per_parameter
            sentences += ways_out(config, ranks, model, machine, weight_bytes)[:2]
    if ranks > choice.plan.world_size:
        sentences.append(_idle(choice, config, ranks))
    if predictable:
        sentences.append(_faster(choice, config, ranks, model, request, machine, loaded))
        sentences.append(_more(choice, config, ranks, model, request, machine, loaded))
    return " ".join(filter(None, sentences))


def what_runs(
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None = None,
) -> str:
    """The plan in one sentence: the short form of `explain`, with its arguments and errors."""
    return _what(choose(config, ranks, model, request, machine, loaded), model, request)


def details_of(
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None = None,
) -> PlanDetails:
    """The plan in numbers; arguments and errors as `explain`."""
    choice = choose(config, ranks, model, request, machine, loaded)
    cost = choice.cost
    predicted = (cost.seconds, choice.alone.seconds, cost.bytes) if _predictable(model, machine) else (0.0, 0.0, 0)
    return PlanDetails(
        model.title,
        dict(zip(AXES, choice.plan.shape, strict=True)),
        choice.plan.patches,
        cost.stage_blocks,
        model.heads,
        model.blocks,
        request.tokens,
        request.batch,
        model.splits_sequence,
        model.has_stages,
        *predicted,
    )


def _predictable(model: ModelFacts, machine: MachineFacts) -> bool:
    return machine.on_gpu and model.splits_sequence  # the constants were fitted to transformers


def _what(choice: Choice, model: ModelFacts, request: RequestFacts) -> str:
    plan = choice.plan
    if plan.world_size == 1:
        return "One rank computes everything."
    reasons = []
    if plan.batch > 1:
        reasons.append(_batch(plan, request.batch))
    if plan.pipe > 1:
        how = "in turn" if plan.patches == 1 else "on patches"
        reasons.append(f"{plan.pipe} stages of {_between(choice.cost.stage_blocks)} blocks work {how}")
    if plan.sequence > 1:
        how = "keys and values go round" if plan.ulysses == 1 else _heads(plan.ulysses, model.heads)
        reasons.append(f"{plan.sequence} ranks share the tokens of a picture ({how})")
    return f"{plan}: {'; '.join(reasons)}."


def _between(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} {'or' if most == least + 1 else 'to'} {most}"


def _batch(plan: ParallelPlan, batch: int) -> str:
    if batch < plan.batch:
        return f"the batch of {batch} fills {batch} of the {plan.batch} ways that the configuration splits it"
    least, rest = divmod(batch, plan.batch)
    rows = f"{least} or {least + 1}" if rest else f"{least}"
    return f"the batch of {batch} is split {plan.batch} ways, {rows} each, which needs no exchange inside of the model"


def _heads(ulysses: int, heads: int) -> str:
    each = -(-heads // ulysses)
    return f"{each} of {heads} heads each" if heads % ulysses == 0 else f"up to {each} of {heads} heads each"


def _why_pipe(choice: Choice, machine: MachineFacts) -> str:
    memory = f"the whole model takes {choice.alone.bytes / GIB:.1f} GiB and a GPU has {machine.usable_bytes / GIB:.1f}"
    if choice.plan.patches == 1:
        return (
            f"The stages compute in turn, because {memory}: that is exact, and one GPU computes at a time. "
            f'Stages "{FASTER}" lets them work at the same time.'
        )
    links = f"the GPUs are joined by slow links ({machine.link.name}); KSampler runs without it"
    why = memory if choice.reason == "memory" else links
    return f"PipeFusion was chosen because {why}. It changes the picture slightly; stages 1 forbids it."


def _coming(choice: Choice, coming: Coming, model: ModelFacts, machine: MachineFacts) -> str:
    """Where weights are that stream, why, and what that costs."""
    copies = coming.copies(model, machine)
    where = "in memory of the host" if "host" in copies else "dealt out over the GPUs"
    where += " and dealt out over the GPUs" if len(copies) > 1 else ""
    holds, whole = choice.cost.weight_bytes / GIB, choice.alone.weight_bytes / GIB
    stay = model.blocks - len(coming.sizes(model))
    staying = f"{stay} of {model.blocks} blocks whole, " if stay else ""
    staying += f"its share of {len(coming.dealt_sizes(model))} more, " if len(copies) > 1 else ""
    short = machine.usable_bytes and choice.alone.bytes > machine.usable_bytes
    why = f", because the whole model does not fit a GPU's {machine.usable_bytes / GIB:.1f} GiB" if short else ""
    sources = {"dealt": "the others", "host": "the host" if len(copies) > 1 else "there"}
    copied = " and ".join(
        f"{size / GIB:.1f} GiB {'' if number else 'a step '}from {sources[kind]}{_over(link, size, machine)}"
        for number, (kind, (size, link)) in enumerate(copies.items())
    )
    text = f"Weights are {where}{why}: each GPU holds {holds:.1f} of {whole:.1f} GiB, {staying}and copies {copied}"
    return f"{text}. The picture is the same."


def _over(link: LinkFacts, size: int, machine: MachineFacts) -> str:
    """How long so many bytes take over a link."""
    if not machine.on_gpu:
        return ""
    rate = f"{'the measured' if link.measured else 'about'} {link.peer:.0f} GB/s"
    return f" ({show_seconds(size / (link.peer * 1e9))} at {rate}, beside the blocks)"


def _faster(
    choice: Choice,
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None,
) -> str:
    """What `auto` could take if it were allowed to change pixels; "" where that would not be faster."""
    if config.pipe is not None or config.may_change_pixels:
        return ""
    other = choose(replace(config, may_change_pixels=True), ranks, model, request, machine, loaded)
    if choice.reason or other.cost.seconds >= choice.cost.seconds:
        return ""  # `_why_pipe` has said it
    return f'With stages on "{FASTER}" it would take {show_seconds(other.cost.seconds)} ({other.plan}).'


def _predicted(choice: Choice, machine: MachineFacts, ranks: int) -> list[str]:
    cost, alone = choice.cost, choice.alone
    known = machine.measured and (machine.link.measured or ranks == 1)
    source = "" if known else ", from typical numbers of such GPUs and links"
    where = "on the fullest GPU" if choice.plan.pipe > 1 else "per GPU"
    text = f"Predicted{source}: {show_seconds(cost.seconds)} per step and {cost.bytes / GIB:.1f} GiB {where}"
    short = machine.usable_bytes and alone.bytes > machine.usable_bytes
    if choice.plan.world_size == 1:
        sentences = [f"{text}."]
    elif short:
        sentences = [f"{text}; one GPU has too little memory for the whole model."]
    else:
        sentences = [f"{text}; one GPU takes {show_seconds(alone.seconds)}."]
    if not short and cost.seconds > alone.seconds:
        sentences.append("So one GPU alone is faster: set the degrees to auto.")
    sentences.append(_memory(cost, machine))
    if machine.usable_bytes and cost.bytes > machine.usable_bytes:
        sentences.append(f"A GPU has {machine.usable_bytes / GIB:.1f} GiB, so that may not fit.")
    return sentences


def _memory(cost: Cost, machine: MachineFacts) -> str:
    """What memory goes to, and what is left of it."""
    text = (
        f"Of memory, weights take {cost.weight_bytes / GIB:.1f} GiB, and activations {cost.activation_bytes / GIB:.1f}"
    )
    text += f", keys and values {cost.buffer_bytes / GIB:.1f}" if cost.buffer_bytes else ""
    left = machine.usable_bytes - cost.bytes
    if not machine.usable_bytes or left < 0:
        return f"{text}."
    return f"{text}; {left / GIB:.1f} of {machine.usable_bytes / GIB:.1f} GiB are left."


def _idle(choice: Choice, config: ParallelConfig, ranks: int) -> str:
    idle = ranks - choice.plan.world_size
    text = f"{idle} of {ranks} ranks {'is' if idle == 1 else 'are'} not used"
    if all(getattr(config, axis) is not None for axis in AXES if axis not in ("pipe", "ring")):
        return f"{text}, as the configuration sets every degree."
    given = math.prod(getattr(config, axis) or 1 for axis in AXES)
    if given > 1 and ranks % given:
        return f"{text}, as {ranks} is no multiple of the {given} that the configuration asks for."
    return f"{text}, as more would not make it faster."


def _more(
    choice: Choice,
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None,
) -> str:
    """What twice the GPUs would give, linked alike."""
    more = choose(config, 2 * ranks, model, request, machine, loaded)
    if more.plan.world_size > choice.plan.world_size and more.cost.seconds < choice.cost.seconds:
        return f"{2 * ranks} GPUs would take {show_seconds(more.cost.seconds)} ({more.plan})."
    return "More GPUs would not make it faster."


def show_seconds(seconds: float) -> str:
    """A duration for people: "41.2 ms", "1.53 s"."""
    milliseconds = seconds * 1e3
    if milliseconds < 100:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{seconds:.2f} s"
