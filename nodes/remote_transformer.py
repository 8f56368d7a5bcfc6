"""The transformer that runs in the pool, as something to call. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.patching.patch_data import UNPATCHED
from parallel_runtime.said import NOTHING, said, together

from .carried_patches import CarriedPatches
from .next_prompt import Start
from .run_notices import RunNotices
from .start_setting import remember_devices
from .transformer_call import TransformerCall
from .transportable import travelling

if TYPE_CHECKING:
    from parallel_runtime.requests.requests import Loaded
    from workers.client.client import PoolClient
    from workers.client.node_requests import LoopRequest, ModelRequest, OnProgress, ShouldCancel

_USED: WeakValueDictionary[str, RemoteTransformer] = WeakValueDictionary()
"""Of those that stand for the same weights (the loader ran again, and ComfyUI still has what it made before) the one
that was used last, by the model's key: they are its own to let go, and ComfyUI counts them once."""


def _connect(config: ParallelConfig) -> PoolClient:
    from workers.client.pool_registry import get_pool

    pool = get_pool(config)
    remember_devices(pool.spec)
    return pool


def may_compute_on(config: ParallelConfig, device: torch.device) -> bool:
    """Whether a rank may compute on ComfyUI's device, and so compete for its memory."""
    if device.type != "cuda":
        return False
    return config.may_use_gpu(torch.cuda.current_device() if device.index is None else device.index)


class RemoteTransformer:
    """A model in a pool, shared by all clones of a MODEL; outlives the pool, which is started and filled anew."""

    def __init__(
        self, model: ModelRequest, notices: RunNotices, connect: Callable[[ParallelConfig], PoolClient] = _connect
    ):
        self.model = model
        self.notices = notices
        self.patches = UNPATCHED  # weight patches of the calls to come
        self.functions = CarriedPatches()
        self.stages = 1  # into how many stages the weights are split
        self.size_bytes = 0  # bytes that one rank holds when the model is loaded; 0 until it was
        self._connect = connect
        self._pool: PoolClient | None = None
        self._capture: tuple[list[TransformerCall], int] | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes that one rank holds now for this; 0 while nothing is loaded. The pool is asked, not remembered."""
        return self._pool.held_bytes(self.model) if self._pool is not None and self._owns else 0

    @property
    def kept(self) -> bool:
        """Whether the pool keeps its weights for this, on the devices or parked on the host."""
        return self._pool is not None and self._owns and self._pool.knows(self.model)

    @property
    def _owns(self) -> bool:
        return _USED.get(self.model.key, self) is self

    def shares(self, device: torch.device) -> bool:
        return may_compute_on(self.model.config, device)

    def load(self, should_cancel: ShouldCancel, make_room: Callable[[int], None] | None = None) -> Loaded:
        """Make the model resident; quick when it is. See PoolClient.load."""
        pool, watching = self._use_pool(should_cancel, "load")
        loaded = pool.load(self.model, watching, make_room)
        self.size_bytes = loaded.bytes_per_rank
        self.stages = loaded.stages
        return loaded

    def forward(self, call: TransformerCall, should_cancel: ShouldCancel) -> torch.Tensor:
        """The prediction of one call, as x is. Raises as PoolClient.forward; RequestError: something cannot travel."""
        conditioning = travelling(call, self.functions)
        if self._capture is not None:
            calls, channels = self._capture
            calls.append(replace(call, conditioning=conditioning))
            return call.x.new_zeros((call.x.shape[0], channels, *call.x.shape[2:]))
        pool, watching = self._use_pool(should_cancel)
        output = pool.forward(
            self.model, call.x, call.timestep, conditioning, patches=self.patches, should_cancel=watching
        )
        self.notices.computed()
        sigmas = call.options.get("sample_sigmas")
        self._note(pool, call.x, 0 if sigmas is None else len(sigmas) - 1, "call")
        return output.to(call.x)

    def invoke(self, method: str, arguments: Mapping[str, Any], should_cancel: ShouldCancel) -> torch.Tensor:
        """What a method of the network gives that needs its weights; see PoolClient.invoke."""
        pool, watching = self._use_pool(should_cancel)
        return pool.invoke(self.model, method, arguments, self.patches, watching)

    def sample(self, request: LoopRequest, on_progress: OnProgress, should_cancel: ShouldCancel) -> torch.Tensor:
        """Run a whole loop in the pool; returns the latent on x's device. Raises as `forward`."""

        def on_step(step: int, total: int, denoised: torch.Tensor | None) -> None:
            if not self.served:  # else some were done before, and are told of at once
                self.notices.computed()
            on_progress(step, total, denoised)

        pool, watching = self._use_pool(should_cancel)
        output = pool.sample(self.model, request, patches=self.patches, on_progress=on_step, should_cancel=watching)
        if pool.ahead.served is not None:
            self.notices.computed_before(pool.ahead.served.steps)
        self._note(pool, request.x, request.steps, (request.job.sampler, len(request.branches)))
        return output.to(request.x)

    @property
    def served(self) -> bool:
        """Whether the pool had begun with the last loop before it was asked."""
        return self._pool is not None and self._pool.ahead.served is not None

    def ahead(self, request: LoopRequest) -> Start:
        """What has the pool begin with a loop, with the weight patches of now, before `sample` is asked for it."""
        model, pool, patches = self.model, self._pool, self.patches
        return lambda: pool is not None and pool.begin_ahead(model, request, patches)

    def finish_run(self, whole: bool = True) -> None:
        """A sampling run is over, as a whole or by an error or cancel: its node shows the plan that ran."""
        self.functions.end()
        if summary := self.notices.finish(whole):
            begun = said("The devices began with it while the last picture was decoded and saved.")
            told = (summary, self.notices.why_by_steps(self.stages), begun if self.served else NOTHING)
            self.notices.tell(together(told))

    def _note(self, pool: PoolClient, x: torch.Tensor, steps: int, how: Hashable) -> None:
        if pool.ran is not None:
            model, config = self.model, self.model.config
            set_up = config.compile, config.attention, config.weights
            how = model.dtype, repr(model.comfyui), set_up, self.patches.names, how
            self.notices.ran(pool.ran, pool.details, x.shape, steps, how)

    def release(self, park: bool, should_cancel: ShouldCancel) -> int:
        """Free or park the weights where no other uses them; returns the bytes freed per rank. PoolError, Cancelled."""
        return self._pool.release(self.model, park, should_cancel) if self._pool is not None and self._owns else 0

    @contextmanager
    def capture(self, channels: int) -> Iterator[list[TransformerCall]]:
        """Record calls instead of running them: inside, `forward` returns zeros of that many channels, at once."""
        self._capture = [], channels
        try:
            yield self._capture[0]
        finally:
            self._capture = None

    def _use_pool(self, should_cancel: ShouldCancel, doing: str = "step") -> tuple[PoolClient, ShouldCancel]:
        """The pool, which may have been replaced; and `should_cancel`, which tells the node what it waits for."""
        self._pool = self._connect(self.model.config)
        _USED[self.model.key] = self
        return self._pool, self.notices.watching(self._pool, should_cancel, doing)
