"""Where hosts meet: the address that the first host listens on, the secret they share, the interface they use."""

from __future__ import annotations

import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import said

from ..launch import home

LISTEN = "PARALLEL_DIT_LISTEN"
SECRET_FILE = "PARALLEL_DIT_SECRET_FILE"
BACKLOG = 512
"""Connections that the kernel holds until they are accepted: no fewer when a pool is small, as strangers count too."""
_SHORTEST_SECRET = 16
_HOW = "docs/several-hosts.md shows how to set up several hosts."


@dataclass(frozen=True)
class Network:
    """One job channel between hosts.

    Args:
        address: IP address of the first host, which listens there.
        port: of the job channel.
        secret: what both sides must know.
    """

    address: str
    port: int
    secret: bytes = field(repr=False)


def parse_address(text: str) -> tuple[str, int]:
    """Split "10.0.0.1:29600".

    Raises:
        ConfigurationError: it is not an address with a port.
    """
    match = re.fullmatch(r"([0-9A-Za-z_.\-]+):(\d{1,5})", text.strip())
    if not match or not 0 < int(match[2]) < 65535:
        raise ConfigurationError(
            said("{text} is not an address with a port.", text=repr(text)), "Write it as 10.0.0.1:29600."
        )
    return match[1], int(match[2])


def read_secret(path: Path) -> bytes:
    """The secret, without the white space around it.

    Raises:
        ConfigurationError: no such file, one that others may read, or a secret that is too short.
    """
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            said("The secret file {path} cannot be read: {strerror}.", path=path, strerror=error.strerror), _HOW
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            said("The secret file {path} can be read by other users.", path=path),
            said("Run chmod 600 {path}.", path=path),
        )
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigurationError(
            said(
                "The secret in {path} has {secret} characters; at least {shortest_secret} are needed.",
                path=path,
                secret=len(secret),
                shortest_secret=_SHORTEST_SECRET,
            ),
            "Make one with: python -c 'import secrets; print(secrets.token_hex(32))'.",
        )
    return secret


def secret_path(environment: Mapping[str, str]) -> Path:
    """$PARALLEL_DIT_SECRET_FILE, else the usual place."""
    given = environment.get(SECRET_FILE)
    return Path(given) if given else home() / ".config" / "parallel-dit" / "secret"


def read_network(environment: Mapping[str, str]) -> Network:
    """The first host's settings.

    Raises:
        ConfigurationError: the address is not set or has no IP address, or as `parse_address` and `read_secret`.
    """
    text = environment.get(LISTEN)
    if not text:
        raise ConfigurationError(
            said(
                "The parallel configuration asks for several hosts, but ${listen} is not set where ComfyUI runs.",
                listen=LISTEN,
            ),
            _HOW,
        )
    name, port = parse_address(text)
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            said(
                "${listen} is {text}, and {name} has no IP address: {error}.",
                listen=LISTEN,
                text=text,
                name=name,
                error=error,
            ),
            _HOW,
        ) from error
    return Network(address, port, read_secret(secret_path(environment)))


def interface_of(address: str) -> str:
    """Name of the network interface that has this IP address: gloo and NCCL are told to use it.

    Raises:
        ConfigurationError: no interface of this host has it.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise ConfigurationError(
        said("No network interface of this host has the address {address}.", address=address), _HOW
    )


def listen(network: Network) -> socket.socket:
    """A non-blocking listener on the job channel.

    Raises:
        ConfigurationError: the address is not this host's, or the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((network.address, network.port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            said(
                "Cannot listen on {address}:{port}: {strerror}.",
                address=network.address,
                port=network.port,
                strerror=error.strerror,
            ),
            said("Set ${listen} to an address of this host with a free port.", listen=LISTEN),
        ) from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
