"""What the nodes talk to: models to load, calls to forward, loops to sample. Restarts and reloads when it must."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from parallel_runtime.errors import NotLoadedError, OutOfMemoryError, PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import (
    Answer,
    ConditioningRef,
    Finished,
    Forward,
    Grow,
    Load,
    Loaded,
    Release,
    Request,
    Sample,
    Step,
    concat_name,
)

from ..gpus import find_machine, remember
from ..launch import PoolSpec, resolve_devices, settings_of_ranks
from ..wire.protocol import Status
from ..wire.shared_memory import Scalar
from .conditioning_cache import ConditioningCache
from .loaded_models import LoadedModels
from .prepared_calls import PreparedCalls, kind_of
from .read_ahead import begin_reading
from .requests import Branch, Inpaint, ModelRequest, SampleRequest, not_finite, require_finite
from .running_pool import POLL_SECONDS, OnCompile, OnProgress, RunningPool, ShouldCancel, Vet
from .step_trace import StepTrace

__all__ = ["Branch", "Cancelled", "Inpaint", "ModelRequest", "PoolClient", "SampleRequest", "never"]

log = logging.getLogger("parallel_dit")

_CPU = torch.device("cpu")
MAX_BACK_OFF_SECONDS = 30.0


def _ignore_progress(step: int, total: int, denoised: torch.Tensor | None) -> None:
    """For requests without steps."""


def _ignore_compiling() -> None:
    """For requests that show nothing of it."""


def never() -> bool:
    """For callers that never cancel."""
    return False


class _Unlike(Exception):
    """The conditioning is not the one that was guessed; nothing was sent."""


def _vet(scalars: Sequence[Scalar]) -> None:
    """Stop a call by x's least and largest value, and by whether its conditioning is not what was guessed."""
    least, largest, *unlike = scalars
    if not (math.isfinite(least) and math.isfinite(largest)):  # as NaN is either
        raise not_finite("latent")
    if any(unlike):
        raise _Unlike


class PoolClient:
    """One pool of ranks. Thread-safe: requests wait for each other, and a cancel is heard while they do.

    A dead pool is replaced at the next request, and a model that the pool lost is loaded again: the MODEL that a
    graph has cached outlives both.

    Args:
        spec: devices. More may be given to it as long as it `grows_to` them.
        rank_module: what each rank runs.
    """

    def __init__(self, spec: PoolSpec, rank_module: str = "workers.rank"):
        self.spec = spec
        self._rank_module = rank_module
        self._lock = threading.RLock()
        self._pool: RunningPool | None = None
        self._models = LoadedModels()
        self.ran: Finished | None = None
        """What the ranks said of the last call or loop: the plan that ran it."""
        self._cache = ConditioningCache()
        self._prepared = PreparedCalls()
        self._trace = StepTrace()
        self._ended = False
        self._deaths = 0  # in a row, without a job that succeeded in between

    def grows_to(self, spec: PoolSpec) -> bool:
        """Whether the pool, running or not, can take in what it lacks of `spec`, and keep what it has."""
        pool = self._pool
        alike = pool is None or not pool.alive or pool.settings == settings_of_ranks(os.environ)
        return alike and self.spec.grows_to(spec)

    def start(self, should_cancel: ShouldCancel = never, needed: PoolSpec | None = None) -> RunningPool:
        """The running pool, started if need be, or grown.

        Args:
            needed: ranks that the pool must have; None for all of `spec`.

        Raises:
            PoolError: it could not start, or not grow; in that case what it was lives on.
            Cancelled: the artist did not want to wait.
        """
        with self._turn(should_cancel):
            if self._ended:
                raise PoolError("ComfyUI is ending.", "Start it again.")
            if self._pool is not None:
                self._pool.settle(should_cancel)
            if self._pool is not None and not self._pool.alive:
                self._pool.close()
                self._pool = None
                self._deaths += 1
            if self._pool is None:
                self._back_off(should_cancel)
                log.info("Parallel DiT: starting a pool on %s", self.spec)
                self._forget()
                self._pool = RunningPool(self.spec, self._rank_module)
            self._pool.wait_until_ready(should_cancel)
            self._grow(self._pool, needed or self.spec, should_cancel)
            return self._pool

    def _grow(self, pool: RunningPool, needed: PoolSpec, should_cancel: ShouldCancel) -> None:
        wished = self.spec if self.spec.holds(needed) else needed
        if pool.spec.holds(needed) or not pool.spec.grows_to(wished):
            return
        log.info("Parallel DiT: the pool on %s becomes %s", pool.spec, wished)
        self._forget()
        try:
            answer, _ = pool.submit(Grow(wished.devices), {}, _ignore_progress, _ignore_compiling, should_cancel)
            self._models.note(answer)
        except PoolError:
            if pool.alive:
                self.spec = pool.spec  # the other devices are free for other pools
            raise

    @contextmanager
    def _turn(self, should_cancel: ShouldCancel) -> Iterator[None]:
        """Hold the pool for one request, after those of other threads."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if should_cancel():
                raise Cancelled
        try:
            yield
        finally:
            self._lock.release()

    def _back_off(self, should_cancel: ShouldCancel) -> None:
        """A pool that died once is replaced at once; one that dies again and again is replaced ever more slowly."""
        wait = min(2.0 ** (self._deaths - 2), MAX_BACK_OFF_SECONDS) if self._deaths > 1 else 0.0
        until = time.monotonic() + wait
        while time.monotonic() < until:
            if should_cancel():
                raise Cancelled
            time.sleep(0.05)

    def load(self, model: ModelRequest, should_cancel: ShouldCancel = never) -> Loaded:
        """Have a model in the pool, on the ranks' devices; quick when it is there already.

        Raises:
            ParallelError: the file, the configuration or the pool; typed, with cause and fix.
            Cancelled: the artist stopped it.
        """
        with self._turn(should_cancel):
            model.check_files()
            needed = resolve_devices(model.config, torch.cuda.device_count)
            if self._pool is None or not self._pool.alive:
                begin_reading(model.path)  # while the ranks start
            pool = self.start(should_cancel, needed)
            machine = find_machine(pool.spec)
            request = Load(model.key, model.path, model.dtype, model.config.to_mapping(), needed.world_size, machine)
            self._models.discard(model.key)
            answer, _ = self._submit(request, {}, _ignore_progress, _ignore_compiling, should_cancel)
            assert isinstance(answer, Loaded)
            if answer.machine is not None and answer.machine != machine:
                remember(pool.spec, answer.machine)
            self._prepared.clear()
            self._models.add(model.key)
            return answer

    def forward(
        self,
        model: ModelRequest,
        x: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Mapping[str, Any],
        should_cancel: ShouldCancel = never,
        on_compile: OnCompile = _ignore_compiling,
    ) -> torch.Tensor:
        """One call of the transformer.

        Args:
            x: (B, C, ...) in the model's dtype, on any device; timestep: (B,) float32.
            conditioning: context (B, T, D) and the family's extras.
            on_compile: called about once a second by each rank that compiles, while it does.

        Returns:
            The prediction, shaped like the latent part of x, on its device.

        Raises:
            ParallelError: the request, or the pool; typed, with cause and fix.
            Cancelled: the artist stopped it.
        """
        with self._turn(should_cancel):
            return self._with(
                model, lambda: self._forward(model, x, timestep, conditioning, should_cancel, on_compile), should_cancel
            )

    def _forward(
        self,
        model: ModelRequest,
        x: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Mapping[str, Any],
        should_cancel: ShouldCancel,
        on_compile: OnCompile,
    ) -> torch.Tensor:
        called = time.perf_counter()
        given = {"x": x, "timestep": timestep}
        submit = partial(
            self._submit,
            on_progress=_ignore_progress,
            on_compile=on_compile,
            should_cancel=should_cancel,
            device=x.device,
        )
        bounds = torch.aminmax(x)
        guess = self._cache.guess(conditioning)
        if guess is not None:
            reference, unlike = guess
            number = self._prepared.find(kind_of(model.key, reference, x, timestep))
            if number:
                referred = time.perf_counter()
                with contextlib.suppress(_Unlike):
                    _, results = submit(Step(number), given, scalars=(*bounds, *unlike), vet=_vet)
                    self._cache.use(reference.id)
                    assert self._pool is not None
                    if summary := self._trace.add((called, referred, *self._pool.stamps, time.perf_counter())):
                        log.info("Parallel DiT: %s", summary)
                    return results["output"]
        reference, tensors, dropped = self._cache.refer(conditioning)
        kind = kind_of(model.key, reference, x, timestep)
        number = self._prepared.find(kind)
        request: Forward | Step = Step(number)
        if not number or dropped:
            number = self._prepared.next_number()
            request = Forward(model.key, reference, dropped, number, self._prepared.dropped())
        _, results = submit(request, tensors | given, scalars=bounds, vet=_vet)
        self._prepared.keep(kind, number)
        return results["output"]

    def sample(
        self,
        model: ModelRequest,
        request: SampleRequest,
        on_progress: OnProgress = _ignore_progress,
        should_cancel: ShouldCancel = never,
        on_compile: OnCompile = _ignore_compiling,
    ) -> torch.Tensor:
        """A whole denoising loop in the pool; returns the latent (B, C, ...) float32 on the CPU.

        Args:
            on_compile: as in `forward`.

        Raises:
            As `forward`.
        """
        request.check_finite()
        with self._turn(should_cancel):
            return self._with(
                model, lambda: self._sample(model, request, on_progress, should_cancel, on_compile), should_cancel
            )

    def _sample(
        self,
        model: ModelRequest,
        request: SampleRequest,
        on_progress: OnProgress,
        should_cancel: ShouldCancel,
        on_compile: OnCompile,
    ) -> torch.Tensor:
        references, tensors, dropped = self._refer_all(request.branches)
        timesteps = request.sigmas if request.timesteps is None else request.timesteps
        tensors |= {"x": request.x, "sigmas": request.sigmas, "timesteps": timesteps}
        for branch, channels in zip(request.branches, request.concat, strict=False):
            tensors[concat_name(branch.index)] = channels
        if request.inpaint is not None:
            inpaint = request.inpaint
            tensors |= {"mask": inpaint.mask, "latent_image": inpaint.latent_image, "noise": inpaint.noise}
        wire = Sample(
            model.key,
            request.sampler,
            references,
            request.cfg,
            request.seed,
            request.noise_device,
            request.inpaint is not None,
            request.preview,
            dropped,
            request.prediction,
            bool(request.concat),
        )
        _, results = self._submit(wire, tensors, on_progress, on_compile, should_cancel)
        return require_finite(results["latent"])

    def release(self, model: ModelRequest) -> int:
        """Free the model's memory in the pool, if the pool runs and holds it; return the bytes freed per rank."""
        with self._lock:
            if self._pool is None or not self._pool.alive or not self._models.knows(model.key):
                return 0
            # The next use asks for a load, which looks whether the file is still the same.
            self._models.discard(model.key)
            self._forget_calls()
            answer, _ = self._submit(Release(model.key), {}, _ignore_progress, _ignore_compiling, never)
            assert isinstance(answer, Finished)
            return answer.bytes_freed

    def held_bytes(self, model: ModelRequest) -> int:
        """Bytes of the model's weights on one rank's device now. Does not wait for a job."""
        pool = self._pool
        return self._models.bytes_of(model.key) if pool is not None and pool.alive else 0

    @property
    def loading(self) -> tuple[int, int] | None:
        """Bytes of weights that are on the device, and of how many, while the job at hand brings them."""
        pool = self._pool
        return pool.loading if pool is not None else None

    def status(self) -> Status | None:
        """The pool's state, or None while no pool runs. Does not wait for a job."""
        pool = self._pool
        return pool.status() if pool is not None and pool.alive else None

    def close(self) -> None:
        """End the pool."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None
            self._forget()

    def end(self, seconds: float) -> None:
        """End the pool for good, whatever it does, in so many seconds: this process ends.

        Waits for no lock: the thread that works with the pool holds it, and is not waited for either.
        """
        self._ended = True
        if self._pool is not None:
            self._pool.close(seconds)

    def _with(self, model: ModelRequest, run: Callable[[], torch.Tensor], should_cancel: ShouldCancel) -> torch.Tensor:
        """Run something that needs the model; once more where the ranks have forgotten it."""
        self._ensure(model, should_cancel)
        try:
            return run()
        except NotLoadedError:
            self.load(model, should_cancel)
            return run()

    def _ensure(self, model: ModelRequest, should_cancel: ShouldCancel) -> None:
        if self._pool is not None:
            self._pool.settle(should_cancel)
        if self._pool is None or not self._pool.alive or not self._models.knows(model.key):
            self.load(model, should_cancel)
        elif self._models.has_left(model.key):
            self._prepared.clear()  # it has to come back to the ranks: that may fail in PREPARE, but not in a step

    def _submit(
        self,
        request: Request,
        tensors: dict[str, torch.Tensor],
        on_progress: OnProgress,
        on_compile: OnCompile,
        should_cancel: ShouldCancel,
        device: torch.device = _CPU,
        scalars: Sequence[torch.Tensor] = (),
        vet: Vet = lambda scalars: None,
    ) -> tuple[Answer, dict[str, torch.Tensor]]:
        assert self._pool is not None
        try:
            answer, results = self._pool.submit(
                request, tensors, on_progress, on_compile, should_cancel, device, scalars, vet
            )
            if not isinstance(request, Load | Release):
                self._deaths = 0
            self._models.note(answer)
            if isinstance(answer, Finished):
                self.ran = answer
            return answer, results
        except _Unlike:
            raise
        except BaseException as error:
            if isinstance(error, OutOfMemoryError):
                self._models.doubt()
            # Whether the ranks kept this request's conditionings is not certain any more.
            self._forget_calls()
            raise

    def _refer_all(
        self, branches: tuple[Branch, ...]
    ) -> tuple[tuple[ConditioningRef, ...], dict[str, torch.Tensor], tuple[int, ...]]:
        references: list[ConditioningRef] = []
        tensors: dict[str, torch.Tensor] = {}
        dropped: tuple[int, ...] = ()
        for branch in branches:
            reference, new, old = self._cache.refer(branch.conditioning, branch.index)
            references.append(reference)
            tensors |= new
            dropped += old
        return tuple(references), tensors, dropped

    def _forget(self) -> None:
        self._models.clear()
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._cache.clear()
        self._prepared.clear()
