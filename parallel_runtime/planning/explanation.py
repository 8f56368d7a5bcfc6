"""What a plan does and why, for the artist: one paragraph."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import AXES, FASTER, ParallelPlan
from ..requests.facts import GIB, LinkFacts, MachineFacts, ModelFacts
from ..requests.requests import PlanDetails
from ..said import Said, said, together
from .coming_blocks import Coming
from .cost import Cost
from .plan import Choice, choose
from .weights_choice import ways_out
from .wish import Wish


def explain(wish: Wish) -> Said:
    """The plan, why, and what it is predicted to take; errors as of `choose`."""
    choice, config, ranks, model, machine = choose(wish), wish.config, wish.ranks, wish.model, wish.machine
    sentences: list[str] = [what_runs(wish)]
    if choice.reason:
        sentences.append(_why_pipe(choice, machine))
    coming = Coming.of(config, ranks)
    if coming is not None:
        sentences += _coming(choice, coming, model, machine)
    if not model.splits_sequence and ranks > 1:
        template = (
            "{model} is not split inside of a picture, as {why}: devices share out CFG branches and the pictures of a "
            "batch."
        )
        sentences.append(said(template, model=model.title, why=model.why_whole))
    if machine.is_crowded:
        template = "Of a GPU's {has} GiB only {free} are free, and the plan reckons with these."
        sentences.append(said(template, has=_gib(machine.memory_bytes), free=_gib(machine.free_bytes)))
    if _predictable(wish):
        sentences += _predicted(choice, machine, ranks)
        if not machine.holds(choice.cost.bytes):
            sentences += ways_out(wish, model.parameters * model.bytes_per_parameter)[:2]
    idle = ranks - choice.plan.world_size
    if idle > 0:
        template = "{idle} of {ranks} devices is not used." if idle == 1 else "{idle} of {ranks} devices are not used."
        sentences.append(said(template, idle=idle, ranks=ranks))
    return together(sentences)


def details_of(wish: Wish) -> PlanDetails:
    """The plan in numbers; errors as `explain`."""
    choice, model, request = choose(wish), wish.model, wish.request
    cost = choice.cost
    predicted = (cost.seconds, choice.alone.seconds, cost.bytes) if _predictable(wish) else (0.0, 0.0, 0)
    degrees, patches = dict(zip(AXES, choice.plan.shape, strict=True)), choice.plan.patches
    sizes = model.heads, model.blocks, request.tokens, request.batch
    return PlanDetails(model.title, degrees, patches, cost.stage_blocks, *sizes, *predicted)


def _predictable(wish: Wish) -> bool:
    return wish.machine.on_gpu and wish.model.splits_sequence  # the constants were fitted to transformers


def what_runs(wish: Wish) -> Said:
    """The plan in one sentence: the short form of `explain`, with its errors."""
    choice, model, request = choose(wish), wish.model, wish.request
    plan = choice.plan
    if plan.world_size == 1:
        return said("One device computes everything.")
    reasons = []
    if plan.batch > 1:
        reasons.append(_batch(plan, request.batch))
    if plan.pipe > 1:
        template = "{stages} stages of {blocks} blocks work on patches"
        if plan.patches == 1:
            template = "{stages} stages of {blocks} blocks work in turn"
        reasons.append(said(template, stages=plan.pipe, blocks=_between(choice.cost.stage_blocks)))
    if plan.sequence > 1:
        how = said("keys and values go round") if plan.ulysses == 1 else _heads(plan.ulysses, model.heads)
        if choice.cost.sending_inputs:
            template = "{how}; {blocks} of {all} blocks send their input instead"
            how = said(template, how=how, blocks=choice.cost.sending_inputs, all=model.blocks)
        reasons.append(said("{ranks} devices share the tokens of a picture ({how})", ranks=plan.sequence, how=how))
    return said("{plan}: {reasons}.", plan=plan.words, reasons=together(reasons, "; "))


def _between(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    if least == most:
        return f"{least}"
    return said("{least} or {most}" if most == least + 1 else "{least} to {most}", least=least, most=most)


def _batch(plan: ParallelPlan, batch: int) -> Said:
    if batch < plan.batch:
        template = "the batch of {batch} fills {batch} of the {ways} ways that the configuration splits it"
        return said(template, batch=batch, ways=plan.batch)
    least, rest = divmod(batch, plan.batch)
    template = "the batch of {batch} is split {ways} ways, {rows} each, which needs no exchange inside of the model"
    return said(template, batch=batch, ways=plan.batch, rows=_between((least, least + 1 if rest else least)))


def _heads(ulysses: int, heads: int) -> Said:
    template = "up to {each} of {heads} heads each" if heads % ulysses else "{each} of {heads} heads each"
    return said(template, each=-(-heads // ulysses), heads=heads)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _why_pipe(choice: Choice, machine: MachineFacts) -> Said:
    template = "the whole model takes {whole} GiB and a GPU has {has}"
    memory = said(template, whole=_gib(choice.alone.bytes), has=_gib(machine.usable_bytes))
    if choice.plan.patches == 1:
        template = "The stages compute in turn, because {why}: that is exact, and one GPU computes at a time."
        way_out = said('Stages "{faster}" lets them work at the same time.', faster=FASTER)
        return together((said(template, why=memory), way_out))
    why = memory
    if choice.reason == "links":
        why = said("the GPUs are joined by slow links ({link}); KSampler runs without it", link=machine.link.name)
    return said("PipeFusion was chosen because {why}. It changes the picture slightly; stages 1 forbids it.", why=why)


def _coming(choice: Choice, coming: Coming, model: ModelFacts, machine: MachineFacts) -> list[Said]:
    """Where weights are that stream, why, and what that costs."""
    size = coming.copied_bytes(model)
    where, source = said("in memory of the host"), said("there")
    if coming.weights == "dealt":
        where, source = said("spread over the GPUs"), said("the others")
    template = "Weights are {where}: each GPU holds {rest}, and copies {copied}. The picture is the same."
    if not machine.holds(choice.alone.bytes):
        template = (
            "Weights are {where}, because the whole model does not fit a GPU's {has} GiB: each GPU holds {rest}, and "
            "copies {copied}. The picture is the same."
        )
    whole = _gib(choice.alone.weight_bytes)
    holds = [said("{holds} of {whole} GiB", holds=_gib(choice.cost.weight_bytes), whole=whole)]
    stay = model.blocks - len(coming.sizes(model))
    if stay:
        holds.append(said("{stay} of {blocks} blocks whole", stay=stay, blocks=model.blocks))
    over = _over(coming.link(machine), size, machine)
    copied = said("{size} GiB a step from {source}{over}", size=_gib(size), source=source, over=over)
    has, rest = _gib(machine.usable_bytes), together(holds, ", ")
    sentences = [said(template, where=where, has=has, rest=rest, copied=copied)]
    if coming.held:
        more = "GPUs with more memory keep more: {counts} of {blocks} blocks, in the order of the devices."
        counts = ", ".join(str(stay + held) for held in coming.held)
        sentences.append(said(more, counts=counts, blocks=model.blocks))
    return sentences


def _over(link: LinkFacts, size: int, machine: MachineFacts) -> str:
    """How long so many bytes take over a link."""
    if not machine.on_gpu:
        return ""
    template = " ({took} at about {rate} GB/s, beside the blocks)"
    if link.measured:
        template = " ({took} at the measured {rate} GB/s, beside the blocks)"
    return said(template, took=show_seconds(size / (link.peer * 1e9)), rate=f"{link.peer:.0f}")


def _predicted(choice: Choice, machine: MachineFacts, ranks: int) -> list[Said]:
    cost, alone = choice.cost, choice.alone
    known = machine.measured and (machine.link.measured or ranks == 1)
    template = "Predicted: {took} per step and {memory}{rest}."
    if not known:
        template = "Predicted, from typical numbers of such GPUs and links: {took} per step and {memory}{rest}."
    where = "{size} GiB on the fullest GPU" if choice.plan.pipe > 1 else "{size} GiB per GPU"
    rest: Said | str = ""
    if choice.plan.world_size > 1:
        rest = said("; one GPU takes {alone}", alone=show_seconds(alone.seconds))
        if not machine.holds(alone.bytes):
            rest = said("; one GPU has too little memory for the whole model")
    predicted = said(template, took=show_seconds(cost.seconds), memory=said(where, size=_gib(cost.bytes)), rest=rest)
    sentences = [predicted, _memory(cost, machine)]
    if not machine.holds(cost.bytes):
        sentences.append(said("A GPU has {has} GiB, so that may not fit.", has=_gib(machine.usable_bytes)))
    return sentences


def _memory(cost: Cost, machine: MachineFacts) -> Said:
    """What memory goes to, and what is left of it."""
    template = "Of memory, weights take {weights} GiB, and activations {activations}"
    parts = [said(template, weights=_gib(cost.weight_bytes), activations=_gib(cost.activation_bytes))]
    if cost.buffer_bytes:
        parts.append(said("keys and values {buffers}", buffers=_gib(cost.buffer_bytes)))
    taken, has = together(parts, ", "), machine.usable_bytes
    if not has or cost.bytes > has:
        return said("{taken}.", taken=taken)
    return said("{taken}; {left} of {has} GiB are left.", taken=taken, left=_gib(has - cost.bytes), has=_gib(has))


def show_seconds(seconds: float) -> str:
    """A duration for people: "41.2 ms", "1.53 s"."""
    milliseconds = seconds * 1e3
    if milliseconds < 100:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{seconds:.2f} s"
