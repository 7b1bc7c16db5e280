"""Pushes a program's plan to the C++ side and dispatches the program behind it, under one lock.

Calls take the items of the oldest plan that is not used up, so plans and programs must come in the same order. `order`,
the int32 that each program takes and returns, puts the programs of one queue one after the other on the device.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from wscope_jax import _ffi, cores, devices, forks
from wscope_jax.errors import MachineError, WscopeError
from wscope_jax.layout import Region
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.pools import HostPools
from wscope_jax.roofline import StepTiming
from wscope_jax.step_plan import StepPlan

T = TypeVar("T")

log = logging.getLogger(__name__)

DEADLINE_S: Final = 120.0  # a store that takes longer than this has hung
SLICE_S: Final = 0.1  # waited at a time, so that Ctrl-C is noticed in between
TIMING_FIELDS: Final = (
    "cpu_ns",
    "link_ns",
    "wait_cpu_ns",
    "wait_link_ns",
    "host_entries",
    "streamed_entries",
)  # columns of the timing ring


def start_workers(count: int) -> None:
    """Starts the workers of this process, or as many of `count` as the system grants.

    Raises:
        MachineError: it grants none, or the workers of another size are busy.
    """
    forks.check("workers")
    try:
        _ffi.start_workers(count)
    except RuntimeError as error:
        raise MachineError(str(error)) from error
    if _ffi.num_workers() < count:
        log.warning(
            "threads: the system granted %d of %d workers; raise the limit on processes (ulimit -u)",
            _ffi.num_workers(),
            count,
        )


def _start_queue() -> _ffi.StepQueue:
    try:
        return _ffi.StepQueue()
    except RuntimeError as error:
        raise MachineError(
            f"cache: the system refuses to start a thread ({error}); raise the limit on processes (ulimit -u)"
        ) from error


class Dispatcher:
    """Queue of plans of one cache, and the tickets of its stores.

    Args:
        pools: memory that plans point into.

    Attributes:
        lock: held from push to dispatch; callers hold it while they decide what to dispatch.
        tickets: stores pushed so far; a store's ticket is this number after its push.
    """

    def __init__(self, pools: HostPools) -> None:
        self.lock = threading.RLock()
        self.tickets = 0
        self._pools = pools
        self._ended: str | None = None
        self._handshake = ""
        forks.mark_started()
        self._queue = _start_queue()
        if _ffi.num_workers() == 0:
            workers = devices.num_workers(None)
            start_workers(workers)
            xla = max(1, cores.available() - workers)
            log.info(
                "%d CPU workers started; keep XLA's own threads to %d (NPROC=%d before JAX starts)",
                workers,
                xla,
                xla,
            )

    @property
    def engine(self) -> int:
        """Id that the calls of programs name: the lowest that was free."""
        return self._queue.id

    @property
    def completed(self) -> int:
        """Stores whose bytes are in place, in the order of their tickets."""
        return self._queue.completed

    @property
    def staged_high_water(self) -> int:
        """Most layers of which blocks were under way at the same time."""
        return self._queue.staged_high_water

    def dispatch(self, plan: StepPlan | None, run: Callable[[], T]) -> T:
        """Pushes `plan` and calls `run`, which dispatches the program; None pushes nothing.

        If `run` raises, its program may not have used up the plan: nothing can be dispatched any more.
        """
        with self.lock:
            self.check_open()
            if plan is None:
                return run()
            try:
                self._push(plan)
                return run()
            except BaseException as error:
                self._ended = f"a program failed to start: {error}"
                raise

    def _push(self, plan: StepPlan) -> None:
        moves = plan.moves.copy()
        moves[:, 1] = np.asarray([self._pools.id(r) for r in HOST_REGIONS], np.int32)[moves[:, 1]]
        self._queue.push(
            jobs=plan.jobs,
            host_pool=self._pools.id(Region.UNPINNED),
            table_ptr=plan.table_ptr,
            table=plan.table,
            load_pool=self._pools.id(Region.PINNED),
            loads=plan.loads,
            stores=plan.stores,
            moves=moves,
        )
        self.tickets += plan.num_stores

    def wait(self, ticket: int) -> None:
        """Returns when the store with `ticket`, and all before it, have their bytes in place.

        Raises:
            WscopeError: a call failed, or the deadline passed.
        """
        stuck_s, completed = 0.0, self.completed
        while ticket > 0 and not self._queue.wait_completed(ticket, SLICE_S):
            # Before its store is reached a program may compute for minutes; only bytes under way can be stuck.
            is_moving = self._queue.staged_layers > 0 and self.completed == completed
            stuck_s, completed = (stuck_s + SLICE_S if is_moving else 0.0), self.completed
            if self._queue.poison is None and self._ended is None and stuck_s < DEADLINE_S:
                continue
            self._ended = (
                self._ended or self._queue.poison or f"no store ended within {DEADLINE_S:.0f} s"
            )
            raise WscopeError(f"store: moving blocks to host memory failed: {self._ended}")

    def timings(self, jobs: int) -> list[StepTiming]:
        """Timings of the steps that ended since the last call; `jobs` host jobs each."""
        if not self._handshake and (handshake := self._queue.handshake):
            self._handshake = handshake
            log.info("the GPU and the CPU workers hand over by %s", handshake)
        return [
            StepTiming(**dict(zip(TIMING_FIELDS, map(int, row), strict=True)), jobs=jobs)
            for row in self._queue.drain_timings()
        ]

    def check_open(self) -> None:
        """Raises WscopeError if nothing can be dispatched any more, and says why."""
        forks.check("cache")
        reason = self._ended or self._queue.poison
        if reason is not None:
            raise WscopeError(f"cache: not usable any more: {reason}")

    def set_fault(self, *, store_delay_ms: int = 0, job_delay_ms: int = 0) -> None:
        """Slows stores and host jobs down: for tests of timing."""
        self._queue.set_fault(store_delay_ms=store_delay_ms, job_delay_ms=job_delay_ms)

    def close(self) -> None:
        """Ends all work under way; may be called twice, and does nothing in a forked child."""
        if forks.is_child():
            return
        with self.lock:
            self._ended = self._ended or "it was closed"
            self._queue.close()
