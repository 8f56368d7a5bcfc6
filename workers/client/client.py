"""What the nodes talk to: models to load, calls to forward, loops to sample. Restarts and reloads when it must."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from parallel_runtime.errors import NotLoadedError, OutOfMemoryError, ParallelError, PoolError
from parallel_runtime.patching.patch_data import UNPATCHED, WeightPatches
from parallel_runtime.requests.comfyui_code import Scalar
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Finished, KeepPatches, Load, Loaded, PlanDetails, Release, Survey

from ..launch import PoolSpec
from ..wire.protocol import Status
from .ahead import Ahead
from .calls import Calls
from .keeper import Keeper
from .loading import LoadedModels, MakeRoom, load_model
from .node_requests import LoopRequest, ModelRequest, OnProgress, Reply, ShouldCancel, Submission, VaeRequest, never
from .running_pool import RunningPool


class PoolClient:
    """One pool of ranks. Thread-safe: requests wait for each other, and a cancel is heard while they do. A dead pool is
    replaced at the next request, and a model that it lost is loaded again: the MODEL in a graph outlives both.
    What is asked of it raises ParallelError, typed, with cause and fix (PoolError where the pool died or could not
    start), and Cancelled where `should_cancel` said so."""

    ran: Finished | None  # what the ranks said of the last call or loop: the plan that ran it
    details: PlanDetails | None  # of that plan, in numbers

    def __init__(self, spec: PoolSpec, rank_module: str = "workers.rank"):
        self.spec = spec
        self._vaes: dict[str, VaeRequest] = {}  # that ran, by their names
        self.ahead = Ahead()
        self.keeper = Keeper(spec, rank_module, self._forget)
        self._forget()

    @property
    def pool(self) -> RunningPool | None:
        """The pool that was started last, and has not been closed; it may have died."""
        return self.keeper.pool

    def start(self, should_cancel: ShouldCancel = never) -> RunningPool:
        """The running pool, started if need be."""
        with self.keeper.turn(should_cancel):
            return self.keeper.start()

    def load(self, model: ModelRequest, should_cancel: ShouldCancel = never, make_room: MakeRoom = None) -> Loaded:
        """Have a model in the pool, on the ranks' devices; quick when it is there already. `make_room` gets the bytes
        of weights that a GPU is about to take, before what is free there is read: others on it may go."""

        def run() -> Loaded:
            model.check_files()
            self._models.known.pop(model.key, None)
            answer = load_model(model, self.keeper, self._submit, make_room)
            self._models.known[model.key] = model, answer
            self._calls.prepare_anew()
            return answer

        return self.keeper.serve(run, should_cancel)

    def forward(
        self, model: ModelRequest, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any], *,
        patches: WeightPatches = UNPATCHED, should_cancel: ShouldCancel = never,
    ) -> torch.Tensor:  # fmt: skip
        """One call of the transformer: x (B, C, ...) in the model's dtype, on any device; timestep (B,) float32;
        context (B, T, D) and the family's extras. The prediction is shaped like the latent part of x, on its device."""
        return self._with(model, lambda: self._calls.run(model.key, x, timestep, conditioning, patches), should_cancel)

    def sample(
        self, model: ModelRequest, request: LoopRequest, *, patches: WeightPatches = UNPATCHED,
        on_progress: OnProgress = lambda *_: None, should_cancel: ShouldCancel = never,
    ) -> torch.Tensor:  # fmt: skip
        """A whole denoising loop in the pool; returns the latent (B, C, ...) float32 on the CPU."""
        request.check_finite()
        return self._with(model, lambda: self._calls.sample(model.key, request, patches, on_progress), should_cancel)

    def begin_ahead(self, model: ModelRequest, request: LoopRequest, patches: WeightPatches) -> bool:
        """Have the ranks begin with a loop that `sample` is thought to be asked for next, with the conditionings of the
        last one, and return whether they do. Nobody waits for it; any other request ends it."""
        with self.keeper.turn(never):
            pool, held = self.keeper.running, self._models.held
            parked = held is not None and model.key not in held  # it would take memory that others asked for
            if pool is None or pool.life.state != "idle" or parked:
                return False
            submission = self._calls.of_loop(model.key, request, patches)
            if submission.tensors.keys() != request.tensors.keys():
                self._calls.forget()  # it has a conditioning of its own, which was noted and is not sent
                return False
            try:
                self.ahead.begin(pool, submission)
            except PoolError:
                return False  # who asks next is told
            return True

    def invoke(
        self, model: ModelRequest, method: str, arguments: Mapping[str, Any], patches: WeightPatches = UNPATCHED,
        should_cancel: ShouldCancel = never,
    ) -> torch.Tensor:  # fmt: skip
        """What a method of ComfyUI's own network (one of INVOKABLE) gives, outside of its forward."""
        return self._with(model, lambda: self._calls.invoke(model.key, method, arguments, patches), should_cancel)

    def run_vae(
        self, vae: VaeRequest, half: str, x: torch.Tensor, *, memory: int = 0, answer_bytes: int = 0, seed: int = 0,
        options: Mapping[str, Scalar] = MappingProxyType({}), into: torch.Tensor | None = None,
        should_cancel: ShouldCancel = never,
    ) -> torch.Tensor:  # fmt: skip
        """Encode or decode, on the CPU; the ranks load a VAE that they lack. Arguments: see RunVae, Submission."""
        request = vae.asked(half, x, memory, seed, options)
        given = Submission(request=request, tensors={"x": x}, answer_bytes=answer_bytes, into=into)
        self._vaes[vae.key] = vae

        def run() -> torch.Tensor:
            self.keeper.start()
            return self._submit(given).tensors["output"]

        return self.keeper.serve(run, should_cancel)

    @property
    def vaes(self) -> list[VaeRequest]:
        """Those on the ranks' devices. Does not wait for a job."""
        # A model that was let go may be on its way.
        return [self._vaes[name] for name in self._there.held or () if name in self._vaes]

    def release(self, model: ModelRequest | VaeRequest, park: bool = False, should_cancel: ShouldCancel = never) -> int:
        """Free a model or a VAE in the pool, or `park` its weights on the host; returns the bytes freed per rank."""
        with self.keeper.turn(should_cancel):
            self.keeper.settle()
            if not self.knows(model):
                return 0
            if not park:
                self._models.known.pop(model.key, None)  # the next use asks for a load: is the file the same?
            self._calls.forget()
            answer = self._submit(Submission(request=Release(model.key, park))).answer
            assert isinstance(answer, Finished)
            return answer.bytes_freed

    def held_bytes(self, model: ModelRequest | VaeRequest) -> int:
        """Bytes of its weights on one rank's device now. Does not wait for a job."""
        return (self._there.held or {}).get(model.key, 0)

    def knows(self, model: ModelRequest | VaeRequest) -> bool:
        """Whether the ranks have it, on their devices or, as far as is known, on the host."""
        return bool(self.held_bytes(model)) or model.key in self._there.known

    @property
    def models(self) -> list[tuple[ModelRequest, Loaded]]:
        """What the ranks can be asked for by name, and what they answered. Does not wait for a job."""
        return list(self._there.known.values())

    def status(self, timeout: float = 5.0) -> Status | None:
        """The pool's state, or None while no pool runs. Does not wait for a job."""
        pool = self.keeper.running
        return pool.status(timeout) if pool is not None else None

    def close(self, for_good: PoolError | None = None) -> None:
        """End the pool; `for_good` says why none starts again."""
        with self.keeper.lock:
            self.keeper.close(for_good)
            self._forget()

    def close_unused(self, seconds: float) -> bool:
        """End a pool that has run nothing since it started, so long ago; return whether it was one."""
        with self.keeper.lock:
            idle = self.keeper.idle_seconds >= seconds
            unused = idle and self.pool is not None and self.ran is None and not self.models
            if unused:
                self.close()
            return unused

    def stop(self, should_cancel: ShouldCancel = never) -> None:
        """End the pool, whatever it does: a request that is being served fails, and the next one starts it again."""
        if (pool := self.keeper.pool) is not None:
            pool.interrupt()
        with self.keeper.turn(should_cancel):
            self.close()

    @property
    def _there(self) -> LoadedModels:
        """What the ranks are known to hold: nothing, where no pool runs."""
        return self._models if self.keeper.running is not None else LoadedModels()

    def _with(self, model: ModelRequest, run: Callable[[], torch.Tensor], should_cancel: ShouldCancel) -> torch.Tensor:
        """Run what needs a model, in its turn, in a pool that lives; again where the ranks forgot it or its patches."""

        def with_weights() -> torch.Tensor:
            self.keeper.settle()
            if model.key not in self._there.known:
                self.load(model, should_cancel)
            elif self._models.held is not None and model.key not in self._models.held:
                self._calls.prepare_anew()  # it has to come back: that may fail in PREPARE, but not in a step
            try:
                return run()
            except NotLoadedError:
                self._calls.patches.forget()
                self.load(model, should_cancel)
                return run()

        return self.keeper.serve(with_weights, should_cancel)

    def _submit(self, submission: Submission) -> Reply:
        """Run one request in the pool that runs, and note what its answer, or its failure, says of the ranks."""
        pool = self.keeper.pool
        assert pool is not None
        begun = None
        try:
            begun = self.ahead.take(pool, submission)
            reply = pool.submit(submission) if begun is None else pool.finish(begun, submission)
        except BaseException as error:
            if isinstance(error, OutOfMemoryError):
                self._models.held = {}  # a rank has let everything go: count on nothing
            self._calls.forget()  # whether the ranks kept this request's conditionings is not certain any more
            if begun is not None and isinstance(error, ParallelError) and not isinstance(error, Cancelled):
                # What failed before anybody asked, perhaps as another model was at work then, is run again.
                raise NotLoadedError(error.cause, error.fix) from error
            raise
        if not isinstance(submission.request, Load | Survey | KeepPatches | Release):
            self.keeper.deaths = 0  # this pool does not die as it starts
        if reply.answer.held is not None:
            self._models.held = reply.answer.held
        if isinstance(reply.answer, Finished) and reply.answer.plan:
            self.ran = reply.answer
            self.details = reply.answer.details or self.details
        return reply

    def _forget(self) -> None:
        """No rank holds anything: what was to be dropped is not told to those that come, either."""
        self.ran = self.details = None
        self._models = LoadedModels()
        self._calls = Calls(self._submit)
