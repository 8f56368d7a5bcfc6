"""How ranks take their devices and meet, the doctor's too. Those on machines without a supervisor, which torchrun alone
has started, make their environment themselves, hear of jobs from rank 0, and answer it, over a group of their own. Each
side says something every second, and the group waits for fifteen: a machine that is unplugged, or stopped, is noticed
without anybody asking."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ..launch import PoolSpec, interface_of, own_address, rank_environment
from ..wire.connection import Connection, ConnectionClosed
from ..wire.frames import Frame, FrameError, encode_header, encode_prefix, read_frame
from ..wire.protocol import Heartbeat, Lost, Message

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
SILENCE = datetime.timedelta(seconds=15)
BEAT_SECONDS = 1.0

log = logging.getLogger("rank")


def make_environment(environment: MutableMapping[str, str]) -> None:
    """What the first machine's supervisor gives to its ranks, of what torchrun says; the CPU's without GPUs."""
    count = int(environment["LOCAL_WORLD_SIZE"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    spec = PoolSpec(kind, tuple(range(count)), int(environment["GROUP_WORLD_SIZE"]))
    interface = interface_of(own_address(environment["MASTER_ADDR"]))
    # The ranks of this machine need a folder that nobody else can read: that of torchrun's own notes is one.
    folder = Path(environment["TORCHELASTIC_ERROR_FILE"]).parents[1]
    kept = {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment.update(rank_environment(spec, folder, environment, interface) | kept)


def take_device(spec: PoolSpec, local_rank: int) -> torch.device:
    """Be on the device of a rank, which is so many among those of this machine."""
    if spec.device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", spec.devices[local_rank])
    torch.cuda.set_device(device)
    # The context exists before DeviceMesh looks, which would choose a device itself.
    torch.zeros(1, device=device)
    return device


def join(spec: PoolSpec, rank: int, device: torch.device, folder: Path) -> None:
    """Join the process group; every rank of the world does. Ranks of one machine meet at a file in the pool's folder
    that nobody else can open; those of several at torchrun's own store."""
    size = spec.world_size
    store = dist.FileStore(str(folder / f"store-{size}"), size) if spec.hosts == 1 else None
    backend = "cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=size)


class GroupLink:
    """Messages without tensors between two ranks. Sends from any thread, receives from one, as `Connection`."""

    def __init__(self, group: dist.ProcessGroup, peer: int):
        self._group = group
        self._peer = peer
        self._lock = threading.Lock()

    def send(self, message: Message, buffers: Sequence[memoryview] = ()) -> None:
        """Send a message; ConnectionClosed where the other side is gone, or does not read."""
        assert not buffers  # tensors go by the group's collectives
        self.forward(encode_header(message))

    def forward(self, header: bytes) -> None:
        """Pass a message on as it came, as `send` does; its tensors go another way."""
        with self._lock:
            for part in (encode_prefix(header, 0), header):
                self._do(dist.send, torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def receive(self) -> Frame:
        """The next message; ConnectionClosed where the other side is gone, or says nothing any more."""
        return read_frame(self._read)

    def _read(self, count: int) -> bytes:
        part = torch.empty(count, dtype=torch.uint8)
        self._do(dist.recv, part)
        return part.numpy().tobytes()

    def _do(self, call: Callable[..., object], part: torch.Tensor) -> None:
        try:
            call(part, self._peer, group=self._group)
        except RuntimeError as error:  # of gloo: the other side has closed, or the group's time is up
            raise ConnectionClosed(str(error)) from error


class Relay:
    """Rank 0's connection to the supervisor, which is that of the ranks elsewhere as well."""

    def __init__(self, connection: Connection, links: dict[int, GroupLink]):
        self._connection = connection
        self._links = links
        self.send = connection.send
        for rank, link in links.items():
            for work in (self._listen, self._beat):
                threading.Thread(target=work, args=(rank, link), name=f"relay-{rank}", daemon=True).start()

    def receive(self) -> Frame:
        """What comes from the supervisor, passed on."""
        frame = self._connection.receive()
        for rank, link in self._links.items():
            try:
                link.forward(frame.header)
            except ConnectionClosed as error:
                self._lose(rank, error)
        return frame

    def _listen(self, rank: int, link: GroupLink) -> None:
        try:
            while True:
                self.send(link.receive().message)
        except (ConnectionClosed, FrameError) as error:
            self._lose(rank, error)

    def _beat(self, rank: int, link: GroupLink) -> None:
        with contextlib.suppress(ConnectionClosed):  # who listens to it notices, too
            while True:
                threading.Event().wait(BEAT_SECONDS)
                link.send(Heartbeat(0, 0))

    def _lose(self, rank: int, error: ConnectionClosed | FrameError) -> None:
        log.info("rank %d is lost: %s", rank, error)
        with contextlib.suppress(ConnectionClosed):  # the pool ends
            self.send(Lost(rank))


Channel = Connection | Relay | GroupLink
"""How a rank hears of jobs and answers: of the supervisor, or of rank 0 on another machine."""


def link_ranks(spec: PoolSpec, rank: int, connection: Connection | None) -> Channel:
    """How this rank hears of jobs. Every rank of a pool over several machines calls it, with the world joined."""
    group = dist.new_group(backend="gloo", timeout=SILENCE)
    assert group is not None
    if connection is None:
        return GroupLink(group, 0)
    if rank > 0:
        return connection
    return Relay(connection, {other: GroupLink(group, other) for other in range(len(spec.devices), spec.world_size)})
