"""A rank at work: one job at a time on its engine, each in its two phases, with its progress and its cancel."""

from __future__ import annotations

import errno
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist

from parallel_runtime import memory
from parallel_runtime.denoising.progress import StepTelling
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.rank_state import Prepared
from parallel_runtime.errors import NotLoadedError, ParallelError, PeerFailedError
from parallel_runtime.mesh.launched import launched
from parallel_runtime.networks.diffusers.lean_imports import leave_out_unused_packages
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.control import Cancelled, Control
from parallel_runtime.requests.requests import Forward, Invoke, Load, RunVae, Sample, Step, Survey

from ..wire.frames import Frame
from ..wire.protocol import Abandon, Doing, Done, Failed, Job, Launched, Progress, Ready, describe
from ..wire.tensors import Segment, pack, unpack_meta, write
from .heartbeat import Heartbeat
from .inbox import ClientMemory, Inbox, import_ahead, share
from .joining import Channel

_MAY_FAIL_ALIKE = (Forward, Invoke, RunVae, Sample, Step)
"""Requests that change nothing of what the ranks hold: a run that fails on all of them need not cost the pool."""
SLOW_SECONDS = 1.0  # jobs that take longer are told of in the log, with their parts
LOADING_SECONDS = 0.25  # between two messages of how far a load is

log = logging.getLogger("rank")


class Rank:
    """This process, as the supervisor knows it."""

    def __init__(self, connection: Channel, engine: Engine, one_host: bool = True, code: ComfyuiCode | None = None):
        self.connection = connection
        self.engine = engine
        self.rank = engine.rank
        self.device = engine.device
        self.client_memory = ClientMemory(for_all=one_host, rank=self.rank)
        self.inbox = Inbox(connection)
        self.heartbeat = Heartbeat(connection, self.rank, blocks=lambda: engine.residency.pulse.count)
        self.imports = import_ahead(engine.device, code)
        self.spent = False

    def work(self) -> None:
        """Main loop. (A cancel has come by the inbox already, and a Run is of a job that failed here in PREPARE.) It
        ends where this process itself can do no more: all ranks have let go of the job by then."""
        while True:
            frame = self.inbox.next(self.imports)
            if isinstance(frame.message, Job):
                self._take(frame, frame.message)
            elif isinstance(frame.message, Abandon):  # another rank could not prepare, or this one, or all failed alike
                self.engine.forget_calls()
                if self.spent:
                    return

    def _take(self, frame: Frame, job: Job) -> None:
        """A job, through both of its phases."""
        self.heartbeat.job = job.number
        if isinstance(job.request, Step):
            try:
                kept = self.engine.recall(job.request)
            except NotLoadedError as error:
                self.connection.send(Failed(job.number, self.rank, describe(error, self.rank), unbegun=True))
            else:
                self._run(frame, job, kept, {})
            return
        begun = time.monotonic()
        prepared = self._prepare(job)
        if prepared is None:
            return
        ready = time.monotonic()
        verdict = self.inbox.verdict(job.number)
        if isinstance(verdict, Abandon):
            prepared.undo()
            self.engine.forget_calls()
            return
        running = time.monotonic()
        self._run(frame, job, prepared, verdict.agreed)
        ended = time.monotonic()
        if ended - begun > SLOW_SECONDS:
            parts = type(job.request).__name__, ready - begun, running - ready, ended - running
            log.info("%s: prepared in %.1f s, waited for the other ranks %.1f s, ran in %.1f s", *parts)

    def _prepare(self, job: Job) -> Prepared | None:
        try:
            self.client_memory.open_for(job)  # what cannot be opened is found here, where it costs the job alone
            load = job.request.load if isinstance(job.request, Survey) else job.request
            if isinstance(load, Load) and load.comfyui is None:
                leave_out_unused_packages()  # of diffusers; this process has no other use for it
            prepared = self.engine.prepare(job.request, unpack_meta(job.tensors), RankControl(self, job))
        except Exception as error:  # noqa: BLE001 - process border: reported to the supervisor, the pool lives
            self.spent = is_spent(error)
            self._fail(job.number, error, cancelled=isinstance(error, Cancelled))
            return None
        self.connection.send(Ready(job.number, self.rank, dict(prepared.offers)))
        return prepared

    def _run(self, frame: Frame, job: Job, prepared: Prepared, agreed: Mapping[str, int]) -> None:
        try:
            segment = self.client_memory.of(job)
            payload = frame.payload if segment is None else segment.request
            alone = segment is not None and self.client_memory.for_all  # every rank copies for itself
            device = torch.device("cpu") if alone and prepared.on_host else self.device
            tensors = share(job.tensors, payload, device, 1 if alone else self.engine.world_size)
            copied = torch.cuda.current_stream(device).record_event() if alone and device.type == "cuda" else None
            control = RankControl(self, job)
            answer, results = prepared.run(tensors, control, agreed)
            if not prepared.cancelled:
                control.steps.flush()  # its last step, before its end is told of
            if copied is not None:
                copied.synchronize()
            outside = None if prepared.takes_part else launched(self.device)
            done = Done(job.number, self.rank, answer, prepared.cancelled, launched=outside)
            done, buffers = self._put(done, results if self.rank == 0 else {}, segment)
        except Exception as error:  # noqa: BLE001 - process border: reported to the supervisor, which may end the pool
            alike = isinstance(job.request, _MAY_FAIL_ALIKE) and not is_lost_peer(error)
            counts = launched(self.device) if alike else None
            if counts is not None:
                self.engine.forget_failed_run()
            self._fail(job.number, error, counts=counts)
            return
        self.heartbeat.got_on()
        self.connection.send(done, buffers)

    def _put(
        self, done: Done, results: Mapping[str, torch.Tensor], segment: Segment | None
    ) -> tuple[Done, Sequence[memoryview]]:
        """The message with what it says of the tensors, and the payload: empty where a segment holds it."""
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in results.values())
        if results and segment is not None and sum(each.nbytes for each in results.values()) <= segment.answer.numel():
            specs = write(segment.answer, results)
            return msgspec.structs.replace(done, tensors=specs, in_segment=True, finite=finite), ()
        specs, buffers = pack(results)
        return msgspec.structs.replace(done, tensors=specs, finite=finite), buffers

    def _fail(self, number: int, error: Exception, cancelled: bool = False, counts: Launched | None = None) -> None:
        """Tell of the error that is being handled."""
        trace = "" if cancelled else traceback.format_exc()
        if memory.is_out_of_memory(error):
            self.engine.free()
            error = memory.explain_out_of_memory(error, self.device, self.rank)
        if not isinstance(error, ParallelError):
            log.error("job %d: %s", number, trace)
        info = describe(error, self.rank, trace)
        if is_lost_peer(error) or isinstance(error, PeerFailedError):
            info = msgspec.structs.replace(info, consequence=True)
        self.connection.send(Failed(number, self.rank, info, cancelled, launched=counts))


class RankControl(Control):
    """Progress and cancel of the job at hand: what the engine tells the supervisor, and hears from it."""

    def __init__(self, rank: Rank, job: Job):
        self._rank = rank
        self._number = job.number
        self.steps = StepTelling(self._report, rank.device)
        self._reported_loading = 0.0

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        self._rank.heartbeat.got_on()
        if self._rank.rank == 0:
            # The others wait for nothing here: the vote keeps them with rank 0.
            self.steps.step(step, total, denoised)

    def _report(self, step: int, total: int, denoised: torch.Tensor | None) -> None:
        specs, buffers = pack({} if denoised is None else {"denoised": denoised})
        self._rank.connection.send(Progress(self._number, step, total, specs), buffers)

    def before_compiling(self) -> None:
        self._rank.heartbeat.watch_compiler()

    def check_cancel(self) -> None:
        self._rank.heartbeat.got_on()
        if self._rank.inbox.cancelled == self._number:
            raise Cancelled

    def loading(self, done: int, total: int) -> None:
        self.check_cancel()
        now = time.monotonic()
        if self._rank.rank == 0 and now - self._reported_loading >= LOADING_SECONDS:
            self._reported_loading = now
            self._rank.connection.send(Doing(self._number, "weights", done, total))

    def measuring(self) -> None:
        if self._rank.rank == 0:
            self._rank.connection.send(Doing(self._number, "measuring"))

    def vote_stop(self, members: dist.ProcessGroup | None) -> Callable[[], bool]:
        stop = self._rank.inbox.cancelled == self._number
        if members is None:
            return lambda: stop
        # Rank 0 alone decides, and its decision travels with the step: a cancel that ranks saw between different
        # steps would leave some of them inside a collective for ever.
        decision = torch.tensor([stop and self._rank.rank == 0], dtype=torch.uint8)
        work = dist.broadcast(decision, src=0, group=members, async_op=True)

        def result() -> bool:
            assert work is not None
            work.wait()
            return bool(decision.item())

        return result


def is_spent(error: BaseException | None) -> bool:
    """A process has no mappings, addresses or descriptors left: other jobs would fail in it, and not in a fresh one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def is_lost_peer(error: Exception) -> bool:
    """A collective failed because its other side is gone. gloo says so in a plain RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
