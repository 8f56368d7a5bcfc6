"""Where the machines of one pool meet: an address of the first one, and each machine's interface that leads there."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

import psutil

from parallel_runtime.errors import ConfigurationError

LISTEN = "PARALLEL_DIT_LISTEN"
_HOW = "docs/several-hosts.md shows how to set up several hosts."


def check_free(address: str, port: int) -> None:
    """Find here, with its cause, what torchrun would say in its log."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            what = "Cannot listen on {where}: {strerror}."
            fix = "Set ${listen} to an address of this host with a free port."
            raise ConfigurationError(
                what, fix, where=f"{address}:{port}", strerror=error.strerror, listen=LISTEN
            ) from error


def read_meeting(environment: Mapping[str, str]) -> tuple[str, int]:
    """Address and port at which torchrun of the first machine listens for the others; ConfigurationError where they are
    not set, or are none."""
    text = environment.get(LISTEN)
    if not text:
        what = "The parallel configuration asks for several hosts, but ${listen} is not set where ComfyUI runs."
        raise ConfigurationError(what, _HOW, listen=LISTEN)
    match = re.fullmatch(r"([0-9A-Za-z_.\-]+):(\d{1,5})", text.strip())
    if not match or not 0 < int(match[2]) < 65536:
        what = "{text} is not an address with a port."
        raise ConfigurationError(what, "Write it as 10.0.0.1:29600.", text=repr(text))
    try:
        return socket.gethostbyname(match[1]), int(match[2])
    except (OSError, UnicodeError) as error:
        what = "${listen} is {text}, and {name} has no IP address: {error}."
        raise ConfigurationError(what, _HOW, listen=LISTEN, text=text, name=match[1], error=error) from error


def interface_of(address: str) -> str:
    """Name of the network interface that has this IP address: gloo and NCCL are told to use it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise ConfigurationError("No network interface of this host has the address {address}.", _HOW, address=address)


def own_address(towards: str) -> str:
    """This machine's address on the way to another one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))
        return probe.getsockname()[0]
