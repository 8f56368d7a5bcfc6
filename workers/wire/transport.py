"""How a job's tensors get to rank 0 and back: through shared memory, or over the socket where there is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .frames import tensor_bytes
from .protocol import Done, TensorSpec
from .shared_memory import Segment, SegmentError, half_for, read, write
from .tensors import pack, unpack

log = logging.getLogger("parallel_dit")


@dataclass(frozen=True)
class Parcel:
    """A request's tensors, ready to be sent.

    Args:
        segment: path of the segment in which they lie; "" where `buffers` holds them.
    """

    specs: tuple[TensorSpec, ...]
    buffers: Sequence[memoryview] = ()
    segment: str = ""


class Transport:
    """The client's side. One job at a time: what `put` wrote is taken by the ranks before it is called again."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._possible = True
        self._on_its_way: torch.cuda.Event | None = None

    def put(self, tensors: Mapping[str, torch.Tensor], answer_bytes: int = 0) -> Parcel:
        """Bring tensors to where the ranks can take them.

        Args:
            answer_bytes: that the answer's tensors may have.

        Raises:
            TypeError: a tensor of a type that does not travel.
        """
        self._finish_taking()
        segment = self._segment_for(max(answer_bytes, sum(tensor.nbytes for tensor in tensors.values())))
        if segment is None:
            specs, buffers = pack(tensors)
            return Parcel(specs, buffers)
        return Parcel(write(segment.request, tensors), (), segment.path)

    def take(self, done: Done, payload: memoryview | None, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of an answer, copied to `device`."""
        if not done.in_segment:
            return {name: tensor.to(device) for name, tensor in unpack(done.tensors, payload).items()}
        assert self._segment is not None
        size = sum(tensor_bytes(spec) for spec in done.tensors)
        into = torch.empty(size, dtype=torch.uint8, device=device)
        self._on_its_way = read(self._segment.answer[:size], into)
        return unpack(done.tensors, into)

    def give_up(self, error: SegmentError) -> None:
        """The ranks cannot open the segment: everything goes over the socket from now on."""
        log.info("Parallel DiT: tensors go over a socket. %s", error)
        self.close()
        self._possible = False

    def close(self) -> None:
        """Let go of the memory; a later `put` takes other memory."""
        self._finish_taking()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _finish_taking(self) -> None:
        if self._on_its_way is not None:  # the last answer is being copied to the GPU, perhaps
            self._on_its_way.synchronize()
            self._on_its_way = None

    def _segment_for(self, size: int) -> Segment | None:
        if not self._possible or (self._segment is not None and self._segment.request.numel() >= size):
            return self._segment
        self.close()
        try:
            self._segment = Segment.create(half_for(size))
        except SegmentError as error:
            self.give_up(error)
        return self._segment
