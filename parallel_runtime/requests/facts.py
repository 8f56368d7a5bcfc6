"""The facts a plan is made of. Plain numbers, equal on every rank: a plan that ranks disagree on is a deadlock.

What is measured (`MachineFacts`) is therefore never measured rank by rank and used at once: it comes with the Load
request, or out of a collective that gives every rank the same numbers. Free of torch, for the doctor."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30
_CONTEXT_BYTES = 2 * GIB
"""That CUDA's contexts, the ranks' and ComfyUI's own, take of a GPU that is free otherwise; plans count them anyway."""


PLAIN, FLOAT8, INT8, QUANTISED = "plain", "float8", "int8", "quantised"
"""What layers take: numbers as they are, those rounded to float8, or what they quantise where no graph sees it."""


@dataclass(frozen=True)
class ModelFacts:
    """A transformer as the cost model sees it."""

    title: str  # how artists call the family
    heads: int  # attention heads
    width: int  # of a token inside of the blocks
    parameters: int  # all of them
    block_sizes: tuple[int, ...]  # parameters of every block, in forward order; blocks are what stages share out
    attentions: tuple[int, ...]  # of every block, how many layers of self-attention it has
    image_parameters: int  # weights that every image token is multiplied with
    text_parameters: int  # those of every text token
    bytes_per_parameter: int = 2  # 2 for bfloat16
    has_stages: bool = False  # PipeFusion can cut it
    why_whole: str = ""  # why ranks cannot share out the tokens of a picture, "" where they can
    # Weights in the blocks that meet one row per picture and that the ranks of a sequence group multiply in shares
    # (networks/modulation.py).
    shared_parameters: int = 0
    # Blocks that attend and feed forward from one input (FLUX's single blocks); compiled, their exchange runs beside
    # matrix products (exchange/layer_beside.py).
    parallel_blocks: int = 0
    # Blocks whose attention is given the layers that make queries, keys and values, once compiled, whose inputs may
    # travel instead, as `takes` says (acceleration/projection_pass.py).
    projecting_blocks: int = 0
    takes: str = PLAIN
    head_dim: int = 0  # of a head; 0: all of them together are as wide as a token

    @property
    def splits_sequence(self) -> bool:
        """Whether ranks can share out the tokens of a picture."""
        return not self.why_whole

    @property
    def bytes_per_number(self) -> int:
        """Of what is computed: a quantised file's layers take and give 16 bit."""
        return max(2, self.bytes_per_parameter)

    @property
    def heads_width(self) -> int:
        """Of all heads together."""
        return self.heads * self.head_dim or self.width

    @property
    def blocks(self) -> int:
        """Of all block lists together."""
        return len(self.block_sizes)

    @property
    def block_parameters(self) -> int:
        """Parameters inside of the blocks."""
        return sum(self.block_sizes)


@dataclass(frozen=True)
class Seen:
    """Shapes of what a network is given: `text` (B, T, D), `latents` (B, C, ...); where a video has sound, that is the
    second of these."""

    text: tuple[int, ...]
    latents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RequestFacts:
    """What one request computes."""

    tokens: int  # of the image or video, per batch row
    text_tokens: int = 0  # that run through the blocks with them; 0 where text enters by cross-attention only
    batch: int = 1  # rows, CFG branches times pictures
    # Token rows of the latent, frames × height, between which PipeFusion cuts it into patches; 1 where it cannot be
    # cut, 0: not known.
    rows: int = 0
    steps: int = 28  # of the run, over which the warm-up of PipeFusion is spread
    in_pool: bool = True  # the whole loop runs in the pool; asked step by step, stages wait for one another

    def most_patches(self, degree: int) -> int:
        """Patches of whole token rows of which every one has a token for each of `degree` ranks; 0: not even one."""
        rows = self.rows or self.tokens
        columns = max(1, self.tokens // rows)
        return rows // -(-degree // columns)


@dataclass(frozen=True)
class LinkFacts:
    """How ranks reach one another."""

    name: str  # for people, "NVLink"
    all_to_all: float  # 10^9 bytes per second that a rank sends in an all-to-all, as the doctor measures it
    latency: float  # seconds of one small exchange
    peer: float  # 10^9 bytes per second from one rank to the next, point to point
    measured: bool = False  # on this machine; else a constant of the kind of link
    # 10^9 bytes per second that a rank sends, and receives at once, by our own way through the host's memory
    # (exchange/host_exchange.py), which attention hides; 0: Ulysses does not take it.
    route: float = 0.0

    @property
    def peer_access(self) -> bool:
        """GPUs that it connects write to each other's memory, so that Ulysses needs no NCCL."""
        return self.name in (NVLINK.name, PCIE.name)


@dataclass(frozen=True)
class MachineFacts:
    """What the ranks run on; the slowest rank's numbers."""

    name: str  # of the GPU
    matmul: float  # 10^12 floating point operations per second in 16 bit, sustained
    attention: float  # the same of its kernels
    memory_rate: float  # 10^9 bytes per second of device memory
    memory_bytes: int  # that one rank may use; 0: not known
    link: LinkFacts  # between ranks of one host
    network: LinkFacts | None = None  # between hosts
    ranks_per_host: int = 0  # 0: all on one
    measured: bool = False  # on this machine; else a constant of the GPU's name
    # Of every rank beside the fastest (mesh/speeds.py), () where they are alike. Ranks measure them when they start, so
    # they are never kept.
    speeds: tuple[float, ...] = ()
    float8: bool = False  # every GPU multiplies in float8
    host_bytes: int = 0  # of the host's memory that weights may take; 0: not known
    host_rate: float = 0.0  # 10^9 bytes per second that each GPU copies from there while all do; 0: not measured
    # Bytes that a model to be loaded can have of each rank's device when all others have left; () where that is not
    # known. The ranks were asked before the load, and agreed on it (engine/prepared_load.py); it is never kept.
    free_each: tuple[int, ...] = ()

    @property
    def free_bytes(self) -> int:
        """Of the rank that has the least; 0: not known."""
        return min(self.free_each, default=0)

    @property
    def host_link(self) -> LinkFacts:
        """From the host's memory to a GPU; each has one of its own."""
        return replace(PCIE, peer=self.host_rate, measured=True) if self.host_rate else PCIE

    @property
    def is_crowded(self) -> bool:
        """Others than the pool hold memory of a GPU that a plan would reckon with, beside the usual contexts."""
        return 0 < self.free_bytes < self.memory_bytes - _CONTEXT_BYTES

    @property
    def usable_bytes(self) -> int:
        """That a rank may plan with: what is free, where that is known and less than what a GPU has. 0: not known."""
        return self.free_bytes if self.is_crowded else self.memory_bytes

    def holds(self, size: int) -> bool:
        """Whether a rank has room for so many bytes, as far as that is known."""
        return not self.usable_bytes or size <= self.usable_bytes

    @property
    def on_gpu(self) -> bool:
        """Predictions mean something on GPUs only."""
        return self.name != CPU.name

    def link_over(self, stride: int, degree: int) -> LinkFacts:
        """The slowest link in a group of `degree` ranks that are `stride` apart."""
        inside = not self.ranks_per_host or self.ranks_per_host % (stride * degree) == 0
        return self.link if inside or self.network is None else self.network


NVLINK = LinkFacts("NVLink", 290.0, 8e-6, 300.0)
PCIE = LinkFacts("PCIe", 20.0, 15e-6, 22.0)
HOST_MEMORY = LinkFacts("host memory (no P2P)", 30.0, 25e-6, 20.0)
ETHERNET = LinkFacts("network", 1.1, 100e-6, 1.1)
SLOW_GB_PER_SECOND = 60.0  # below it a link counts as slow: everything but NVLink

CPU = MachineFacts("CPU", 0.05, 0.03, 1e6, 0, LinkFacts("host memory", 1e6, 0.0, 1e6))
"""CPU ranks are there to try a split out, and share their cores: exchange and memory cost nothing, so that `auto`
splits there whatever it can split."""

_GPUS = (
    # Part of the name; sustained TFLOP/s in matrix products and attention, GB/s of memory. H200: measured.
    # The others: data sheets, scaled by what the H200 sustains of its own.
    ("B200", 1500.0, 1100.0, 7000.0),
    ("H200", 685.0, 575.0, 4200.0),
    ("H100", 640.0, 540.0, 2900.0),
    ("A100", 230.0, 170.0, 1600.0),
    ("L40", 160.0, 120.0, 750.0),
    ("RTX PRO 6000", 380.0, 270.0, 1500.0),
    ("5090", 190.0, 150.0, 1500.0),
    ("4090", 150.0, 120.0, 850.0),
    ("3090", 60.0, 50.0, 800.0),
    ("5060 Ti", 43.0, 34.0, 400.0),
    ("", 100.0, 75.0, 700.0),  # any other
)


def known_gpu(name: str, memory_bytes: int, link: LinkFacts) -> MachineFacts:
    """Return the constants of a GPU by its name, for as long as nothing is measured."""
    _, matmul, attention, memory_rate = next(row for row in _GPUS if row[0] in name)
    return MachineFacts(name, matmul, attention, memory_rate, memory_bytes, link)
