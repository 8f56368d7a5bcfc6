"""One end of a socket, asynchronous: the supervisor's. (Client and ranks have theirs in `connection.py`.)"""

from __future__ import annotations

import asyncio
import select
import socket

from .frames import PREFIX, WITHOUT_PAYLOAD, Frame, decode_header, decode_prefix, encode_header, encode_prefix
from .protocol import Message


class Endpoint:
    """One non-blocking connection: the client's, or a rank's."""

    def __init__(self, sock: socket.socket, name: str):
        sock.setblocking(False)
        self.socket = sock
        self.name = name
        self.left_unread = False
        """The other side ended, and had not read all that was sent to it: of a Unix socket, the kernel tells."""
        self._sending = asyncio.Lock()

    @property
    def sending(self) -> bool:
        """Something is on its way out: the other side has not read all of it."""
        return self._sending.locked()

    @property
    def hung_up(self) -> bool:
        """The other side has closed its end, though what it said before may not be read yet."""
        watch = select.poll()
        watch.register(self.socket, select.POLLRDHUP)
        return bool(watch.poll(0))

    async def receive(self) -> Frame | None:
        """The next frame, or None at the end of the connection; FrameError where what comes is none."""
        try:
            flags, header_bytes, payload_bytes = decode_prefix(await self._read(PREFIX.size))
            header = bytes(await self._read(header_bytes))
            message = decode_header(header, payload_bytes, flags)
            payload = memoryview(await self._read(payload_bytes)) if payload_bytes else None
        except (OSError, EOFError) as error:  # a pulled cable is an OSError of its own kind
            self._note(error)
            return None
        return Frame(message, header, payload)

    async def _read(self, count: int) -> bytearray:
        loop = asyncio.get_running_loop()
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            received = await loop.sock_recv_into(self.socket, view)
            if not received:
                raise EOFError(self.name)
            view = view[received:]
        return buffer

    async def send(self, message: Message) -> None:
        """Send a message without tensors."""
        await self.forward(Frame(message, encode_header(message), None), with_payload=False)

    async def forward(self, frame: Frame, with_payload: bool = True) -> None:
        """Pass a frame on as it came; without its payload the receiver gets the header alone.

        A receiver that is gone is noticed where its connection is read, so a failed send is not an error here.
        """
        payload = frame.payload if with_payload else None
        flags = WITHOUT_PAYLOAD if payload is None else 0
        prefix = encode_prefix(frame.header, payload.nbytes if payload is not None else 0, flags)
        loop = asyncio.get_running_loop()
        try:
            async with self._sending:
                await loop.sock_sendall(self.socket, prefix + frame.header)
                if payload is not None:
                    await loop.sock_sendall(self.socket, payload)
        except OSError as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        """The kernel tells it once, to whoever reads or sends first."""
        if isinstance(error, ConnectionResetError) and self.socket.family == socket.AF_UNIX:
            self.left_unread = True
