"""What a step costs under a plan: predicted time and memory of one rank. Pure arithmetic on facts: a roofline of matrix
products and attention at the GPU's sustained rates, elementwise work and weights at its memory's, exchanges as latency
and bytes over bandwidth. Where each constant was measured is in cost_constants.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..config import ParallelPlan
from ..requests.facts import NVLINK, MachineFacts, ModelFacts, RequestFacts
from . import cost_constants as fitted
from .coming_blocks import Coming
from .cut import Assignment, assign_blocks, kept_bytes, most_parameters
from .host_route import of_compiled, on_route


@dataclass(frozen=True)
class Cost:
    """Prediction for a plan."""

    seconds: float  # per step, warm-up steps of PipeFusion averaged in
    exchange_seconds: float  # of these, waiting for other ranks
    # Device memory of the rank that needs the most, or of one with the least memory where others keep more blocks.
    weight_bytes: int
    activation_bytes: int
    buffer_bytes: int  # of the K and V that PipeFusion keeps
    stage_blocks: tuple[int, ...] = ()  # blocks of every stage
    # Per step, were all weights there. How long they come makes no difference between plans, where ranks are alike.
    computing_seconds: float = 0.0
    sending_inputs: int = 0  # blocks that send what heads are made of, in their place

    @property
    def bytes(self) -> int:
        """Device memory altogether."""
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes


@dataclass(frozen=True)
class PlannedStep:
    """One rank's step of the request under a plan; the rank with the most to do."""

    plan: ParallelPlan
    model: ModelFacts
    request: RequestFacts
    machine: MachineFacts
    compiled: bool  # the blocks went through torch.compile
    split_weights: bool = True  # each stage of a pipe holds only its own blocks
    coming: Coming | None = None  # how weights come block by block; None where they do not

    def cost(self) -> Cost:
        """What it is predicted to cost."""
        computing, exchange = self.seconds()
        on_their_way = self.coming.seconds(self.model, self.machine, self.plan.world_size) if self.coming else 0.0
        stage_blocks = tuple(stop - start for start, stop in self.assignment)
        _, sending = self.on_route() or (0.0, 0)
        return Cost(max(computing, on_their_way), exchange, *self.memory(), stage_blocks, computing, sending)

    @cached_property
    def assignment(self) -> Assignment:
        """Blocks of every stage, as the ranks assign them."""
        model, plan = self.model, self.plan
        if plan.pipe == 1:
            return ((0, model.blocks),)
        most = most_parameters(self.machine.memory_bytes if self.split_weights else 0, model.bytes_per_parameter)
        return assign_blocks(model.block_sizes, plan.pipe, most)

    @cached_property
    def batch(self) -> int:
        """Rows of this rank."""
        return -(-self.request.batch // self.plan.batch)

    @cached_property
    def slowdown(self) -> float:
        """Of products and attention, against 16 bit."""
        return fitted.FLOAT32_SLOWDOWN if self.model.bytes_per_parameter == 4 else 1.0

    @cached_property
    def matmul(self) -> float:
        """Multiply-adds and adds per second."""
        return self.machine.matmul * 1e12 / self.slowdown

    @cached_property
    def share(self) -> float:
        """Of the blocks: those of the longest stage."""
        return max(stop - start for start, stop in self.assignment) / self.model.blocks

    @cached_property
    def token_share(self) -> float:
        """Of a picture's tokens: those that the slowest of all ranks would compute in the time of a rank's share. Ranks
        of unlike speed share in its proportion, but for the ranks of a stage, which share equally."""
        speeds, group = self.machine.speeds, self.plan.sequence
        if self.plan.pipe > 1 or not speeds:
            return 1 / group
        starts = range(0, self.plan.world_size, group)
        return max(min(speeds) / sum(speeds[start : start + group]) for start in starts)

    def activation(self, tokens: float) -> float:
        """Bytes of one activation of so many tokens of each row."""
        return self.numbers(tokens, self.model.width)

    def numbers(self, tokens: float, width: float) -> float:
        """Bytes of so many numbers of so many tokens of each row."""
        return self.batch * tokens * width * self.model.bytes_per_number

    @cached_property
    def other_parameters(self) -> float:
        """Weights in the blocks that image tokens do not meet and that this rank reads."""
        model = self.model
        if not self.machine.on_gpu:
            return 0.0  # memory costs nothing there, and no plan is to win by what it does
        shared = model.shared_parameters * (1 - 1 / self.plan.sequence)
        return max(0.0, model.block_parameters - model.image_parameters - shared)

    def pass_seconds(self, image: float, text: float, keys: float, waiting: bool = False) -> float:
        """This rank's stage over `image` and `text` tokens of its own, all ranks' attending `keys`, without exchange;
        `waiting`: a receive of NCCL over NVLink waits meanwhile."""
        model, machine = self.model, self.machine
        share = self.share
        tokens = max(1.0, image + text)
        rows = self.batch * tokens
        flops = 2 * self.batch * (image * model.image_parameters + text * model.text_parameters) * share
        weights = (model.image_parameters + model.text_parameters) / 2 * share * model.bytes_per_parameter
        rate = machine.memory_rate * 1e9
        lost = fitted.ROWS_LOST + (min(fitted.ROWS_OF_A_WAVE, rows / 2) if waiting else 0)
        products = max(flops / self.matmul * (1 + lost / rows), weights / rate)
        others = self.other_parameters * share * model.bytes_per_parameter / rate
        attention = self.attention_seconds(tokens, keys) * model.blocks * share
        passes = self.activation(tokens) * fitted.PASSES[self.compiled] * model.blocks * share / rate
        least = fitted.BLOCK_SECONDS[self.compiled] * model.blocks * share if machine.on_gpu else 0.0
        return products + others + attention + passes + least

    def attention_seconds(self, tokens: float, keys: float) -> float:
        """Of one block, for so many tokens of this rank."""
        rate = self.machine.attention * 1e12 / self.slowdown
        return 4 * self.batch * tokens * keys * self.padded_width / rate

    @cached_property
    def padded_width(self) -> float:
        """Of all heads together, with those that are padded in, so that each Ulysses rank has as many."""
        padded = -(-self.model.heads // self.plan.ulysses) * self.plan.ulysses
        return self.model.heads_width * padded / self.model.heads

    def exchange_seconds(self, image: float, text: float, keys: float) -> float:
        """Of Ulysses and ring in all blocks of a stage, for so many tokens of this rank."""
        plan, blocks = self.plan, self.model.blocks * self.share
        tokens, seconds = image + text, 0.0
        if plan.ulysses > 1:
            link = self.machine.link_over(1, plan.ulysses)
            sent = 4 * self.numbers(tokens, self.padded_width) * (1 - 1 / plan.ulysses)
            moved = sent / (link.all_to_all * 1e9)
            if route := self.on_route():
                seconds = blocks * 2 * link.latency + route[0]
            elif plan.sequence > plan.ulysses or plan.pipe > 1 or not link.peer_access:
                started = link.latency + (fitted.COLLECTIVE_SECONDS if self.machine.on_gpu else 0.0)
                seconds += blocks * (2 * started + moved)
            else:
                hiding = self.model.parallel_blocks if self.compiled else 0
                beside = 2 * self.batch * tokens * self.beside_parameters / self.matmul
                seconds += blocks * (2 * link.latency + moved) - hiding * min(moved, beside)
        if plan.ring > 1:
            link = self.machine.link_over(plan.ulysses, plan.ring)
            sent = 2 * self.numbers(keys / plan.ring, self.model.heads_width) / plan.ulysses
            # Attention runs meanwhile, but measured steps are as long as if it ran afterwards.
            passed = link.latency + sent / (link.peer * 1e9)
            attended = self.numbers(tokens, self.model.heads_width)
            merge = 2 * attended * fitted.MERGE_PASSES / (self.machine.memory_rate * 1e9)
            seconds += blocks * (plan.ring - 1) * (passed + merge)
        return seconds

    def on_route(self) -> tuple[float, int] | None:
        """Seconds that all blocks' exchanges through the host's memory show, and how many of them send inputs; None
        where they do not go that way."""
        plan, model, machine = self.plan, self.model, self.machine
        if not machine.link_over(1, plan.ulysses).route or plan.pipe > 1 or not plan.sequence == plan.ulysses > 1:
            return None
        keys = self.request.tokens + self.request.text_tokens
        rows = self.batch * keys * self.token_share
        sizes = rows, keys, self.padded_width, model.width, self.beside_parameters
        block = on_route(machine, plan.ulysses, *sizes, number=model.bytes_per_number, slowdown=self.slowdown)
        if not self.compiled:
            return model.blocks * block.shown, 0
        return of_compiled(model, block, plan.ulysses, machine.float8)

    @property
    def beside_parameters(self) -> float:
        """Of the feed-forward layer of a parallel block."""
        return fitted.FEED_FORWARD * self.model.image_parameters / self.model.blocks

    def hop_seconds(self, tokens: float) -> float:
        """One stage hands so many tokens on to the next."""
        link = self.machine.link_over(self.plan.sequence, self.plan.pipe)
        return link.latency + self.activation(tokens) / (link.peer * 1e9)

    def around_seconds(self) -> float:
        """Of a step outside of the forward."""
        if not self.machine.on_gpu:
            return 0.0
        seconds = fitted.STEP_SECONDS + (fitted.MEETING_SECONDS if self.plan.world_size > 1 else 0.0)
        if self.plan.batch > 1:
            link = self.machine.link_over(self.plan.world_size // self.plan.batch, self.plan.batch)
            gathered = self.request.batch * self.request.tokens * fitted.LATENT_BYTES
            seconds += link.latency + gathered / (link.all_to_all * 1e9)
        return seconds

    def seconds(self) -> tuple[float, float]:
        """Return a step's seconds where all weights are there, and those of them that are exchange."""
        plan, request = self.plan, self.request
        image, text = request.tokens * self.token_share, request.text_tokens * self.token_share
        keys = request.tokens + request.text_tokens
        exchange = self.exchange_seconds(image, text, keys)
        whole = self.pass_seconds(image, text, keys) + exchange
        around = self.around_seconds()
        if plan.pipe == 1:
            return whole + around, exchange
        hop = self.hop_seconds(image + text)
        synchronous = plan.pipe * (whole + hop)
        if not request.in_pool:
            return synchronous + around, plan.pipe * (exchange + hop)
        patch = image / plan.patches
        exchange = self.exchange_seconds(patch, text / plan.patches, keys)
        # Text goes with the first patch; spread over all of them the sum over a step is the same.
        waiting = self.machine.link_over(plan.sequence, plan.pipe).name == NVLINK.name
        computed = self.pass_seconds(patch, text / plan.patches, keys, waiting)
        hop = self.hop_seconds(patch + text / plan.patches)
        host = fitted.PATCH_SECONDS if self.machine.on_gpu else 0.0
        pace = max(computed + exchange, hop) + self.machine.link.latency + host
        # With fewer patches than stages, a stage waits until its patch comes back from the last one.
        step = max(plan.patches, plan.pipe) * pace
        warm = min(plan.warmup_steps, request.steps)
        total = warm * synchronous + (request.steps - warm) * step + (plan.pipe - 1) * pace
        return total / request.steps + around, plan.patches * (exchange + max(0.0, hop - computed))

    def memory(self) -> tuple[int, int, int]:
        """Return bytes of weights, activations and K/V buffers, on the rank where they are most together."""
        plan, request = self.plan, self.request
        tokens = (request.tokens + request.text_tokens) / plan.sequence
        alive = fitted.LIVE_ACTIVATIONS + (fitted.EXCHANGE_BUFFERS if plan.sequence > 1 else 0)
        # That no tensor is in: once, as what is free is less by the rank's own context, and a whole GPU is not.
        context = fitted.CONTEXT_TO_COME if self.machine.is_crowded else fitted.CONTEXT_BYTES
        activations = alive * self.activation(tokens) + (context if self.machine.on_gpu else 0)
        weights, kept = max((self._held(*owned) for owned in self.assignment), key=sum)
        return weights, int(activations), kept

    def _held(self, start: int, stop: int) -> tuple[int, int]:
        """Bytes of weights, and of keys and values, on a rank whose stage has these blocks."""
        model, request = self.model, self.request
        if self.coming is not None:
            return self.coming.kept_bytes(model), 0
        inside = sum(model.block_sizes[start:stop]) if self.split_weights else model.block_parameters
        weights = (model.parameters - model.block_parameters + inside) * model.bytes_per_parameter
        if self.plan.pipe == 1:
            return weights, 0
        return weights, kept_bytes(model, (start, stop), self.batch * (request.tokens + request.text_tokens))
