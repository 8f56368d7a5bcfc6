"""Brings networks beside the model to the ranks: once each, by pieces that shared memory need not grow for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from parallel_runtime.networks.comfyui.module_tree import describe_module
from parallel_runtime.requests.patches import Attached
from parallel_runtime.requests.requests import Attach, attached_name

from ..wire.tensors import in_pieces
from .mirror import Mirror
from .submission import Callbacks, Reply, Submission

_PIECE = 256 << 20
"""Bytes of tensors in one request."""


class Attachments:
    """Keeps the ranks' networks those that somebody here has.

    Args:
        submit: runs one request in the pool.
    """

    def __init__(self, submit: Callable[[Submission], Reply]):
        self._submit = submit
        self._mirror: Mirror[int, None] = Mirror()
        self._gone: list[int] = []

    def bring(self, networks: Iterable[Attached], callbacks: Callbacks) -> None:
        """Have the ranks know these, and forget those that nobody here has any more.

        Raises:
            RequestError: a network is not made of data.
        """
        for each in networks:
            if each.number not in self._mirror:
                self._send(each, callbacks)
                self._mirror.hold(each.number, None)
                weakref.finalize(each.module, self._gone.append, each.number)
        if gone := self._let_go():
            self._submit(Submission(request=Attach(dropped=gone), callbacks=callbacks))

    def forget(self) -> None:
        """Trust none of them any more."""
        self._mirror.doubt()

    def _let_go(self) -> tuple[int, ...]:
        """Numbers that the ranks have not been told to forget yet."""
        while self._gone:  # which the collector of any thread adds to
            self._mirror.let_go(self._gone.pop())
        return tuple(sorted(self._mirror.untold()))

    def _send(self, network: Attached, callbacks: Callbacks) -> None:
        tensors: list[torch.Tensor] = []
        form: Any = describe_module(network.module, tensors)
        named = {attached_name(place): tensor for place, tensor in enumerate(tensors)}
        for piece in in_pieces(named, _PIECE):
            request = Attach(network.number, dropped=self._let_go())
            self._submit(Submission(request=request, tensors=piece, callbacks=callbacks))
        self._submit(Submission(request=Attach(network.number, form, self._let_go()), callbacks=callbacks))
