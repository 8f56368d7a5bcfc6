"""One end of a socket: the blocking one of client and ranks, and the supervisor's asynchronous one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .frames import PREFIX, Frame, decode_header, decode_prefix, encode_header, encode_prefix, read_frame
from .protocol import Message

STUCK_SECONDS = 0.05
BACKLOG = 512  # connections of ranks that the kernel holds until they are accepted


class ConnectionClosed(Exception):
    """The other side is gone."""


class Connection:
    """Sends from any thread, receives from one."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(
        self, message: Message, buffers: Sequence[memoryview] = (), while_stuck: Callable[[], object] = lambda: None
    ) -> None:
        """Send a message and the bytes of its tensors, unless both sides share those; ConnectionClosed at the end.
        `while_stuck` is called again and again while the other side does not read. It may raise; the connection is of
        no use then, as half a message is out."""
        header = encode_header(message)
        prefix = encode_prefix(header, sum(buffer.nbytes for buffer in buffers))
        try:
            with self._send_lock:
                self._write(memoryview(prefix + header), while_stuck)
                for buffer in buffers:
                    self._write(buffer.cast("B"), while_stuck)
        except (OSError, ValueError) as error:  # the latter of a poll for a socket that another thread has closed
            raise ConnectionClosed(str(error)) from error

    def offer(self, message: Message) -> bool:
        """Send a small message if that takes no waiting; return whether it is out."""
        header = encode_header(message)
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            self._socket.sendmsg([encode_prefix(header, 0), header], [], socket.MSG_DONTWAIT)
            return True
        except OSError:  # nobody reads, or nobody is there any more, which `receive` finds
            return False
        finally:
            self._send_lock.release()

    def _write(self, view: memoryview, while_stuck: Callable[[], object]) -> None:
        writable = select.poll()  # `select` takes no descriptor above 1023, and ComfyUI may have more files open
        writable.register(self._socket, select.POLLOUT)
        while view:
            try:
                view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not writable.poll(1000 * STUCK_SECONDS):
                    while_stuck()

    def receive(self) -> Frame:
        """Wait for the next frame; ConnectionClosed at the end, FrameError where what comes is none."""
        return read_frame(self._read)

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        try:
            while view:
                received = self._socket.recv_into(view)
                if not received:
                    raise ConnectionClosed("end of file")
                view = view[received:]
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        return buffer

    def close(self) -> None:
        """Close both directions; a `receive` that waits in another thread returns with ConnectionClosed."""
        with contextlib.suppress(OSError):  # it was closed by the other side already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Endpoint:
    """The supervisor's end, which waits for nobody else meanwhile."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.socket = sock
        self.left_unread = False  # the other side ended, and had not read all that was sent to it
        self.sending = asyncio.Lock()  # locked while something is on its way out: the other side has not read all of it

    async def receive(self) -> Frame | None:
        """The next frame, or None at the end of the connection; FrameError where what comes is none."""
        try:
            header_bytes, payload_bytes = decode_prefix(await self._read(PREFIX.size))
            header = bytes(await self._read(header_bytes))
            message = decode_header(header, payload_bytes)
            payload = memoryview(await self._read(payload_bytes)) if payload_bytes else None
        except ConnectionResetError:  # which the kernel tells once, to whoever reads or sends first
            self.left_unread = True
            return None
        except (OSError, EOFError):
            return None
        return Frame(message, header, payload)

    async def _read(self, count: int) -> bytearray:
        loop = asyncio.get_running_loop()
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            received = await loop.sock_recv_into(self.socket, view)
            if not received:
                raise EOFError
            view = view[received:]
        return buffer

    async def send(self, message: Message) -> None:
        """Send a message without tensors."""
        await self.forward(Frame(message, encode_header(message), None))

    async def forward(self, frame: Frame, with_payload: bool = True) -> None:
        """Pass a frame on as it came; without its payload the receiver gets the header alone."""
        payload = frame.payload if with_payload and frame.payload is not None else memoryview(b"")
        prefix = encode_prefix(frame.header, payload.nbytes)
        loop = asyncio.get_running_loop()
        try:
            async with self.sending:
                await loop.sock_sendall(self.socket, prefix + frame.header)
                if payload.nbytes:  # nothing more is sent to who has read it all, and may be gone
                    await loop.sock_sendall(self.socket, payload)
        except OSError:  # the receiver is gone, which is noticed where its connection is read
            self.left_unread = True


def listen_in(folder: Path) -> socket.socket:
    """A non-blocking listener for ranks in the pool's private folder."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _socket_of(folder) as path:
        sock.bind(path)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def connect_in(folder: Path) -> socket.socket:
    """Connect to it; OSError where nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _socket_of(folder) as path:
        sock.connect(path)
    return sock


@contextlib.contextmanager
def _socket_of(folder: Path) -> Iterator[str]:
    """Its path through the folder's descriptor: the kernel takes 107 bytes as one, and $TMPDIR alone may have more."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/ranks.socket"
    finally:
        os.close(descriptor)
