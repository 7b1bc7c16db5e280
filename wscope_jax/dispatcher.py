"""Pushes a program's plan to the C++ side and dispatches the program behind it, under one lock.

Calls take the items of the oldest plan that is not used up, so plans and programs must come in the same order. `order`,
the int32 that each program takes and returns, puts the programs of one queue one after the other on the device.
"""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import numpy as np

from wscope_jax import _ffi, cores, devices, forks
from wscope_jax.arguments import integer
from wscope_jax.errors import MachineError, WscopeError
from wscope_jax.layout import Region
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.pools import HostPools
from wscope_jax.roofline import StepTiming
from wscope_jax.step_plan import StepPlan

T = TypeVar("T")

log = logging.getLogger(__name__)

DEADLINE_S: Final = 120.0  # a store that takes longer than this has hung
MOST_DELAY_MS: Final = 60_000  # of a fault
SLICE_S: Final = 0.1  # waited at a time, so that Ctrl-C is noticed in between
TIMING_FIELDS: Final = (
    "cpu_ns",
    "link_ns",
    "link_idle_ns",
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
        is_told: a caller got the error that says why nothing can be dispatched any more.
    """

    def __init__(self, pools: HostPools) -> None:
        self.lock = threading.RLock()
        self.tickets = 0
        self._pools = pools
        self._ended: str | None = None
        self._is_closed = False
        self.is_told = False
        self._order: Any = None  # what the program dispatched last returns
        self._plan: StepPlan | None = None  # of that program
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
        _started.add(self)

    @property
    def failure(self) -> str | None:
        """Text of the first call of a program that failed; None once closed."""
        return None if self._is_closed else self._queue.poison

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

    def dispatch(
        self,
        plan: StepPlan | None,
        run: Callable[[], tuple[jax.Array, T]],
        may_take_back: Callable[[], bool] = lambda: False,
    ) -> T:
        """Pushes `plan` and calls `run`, which dispatches the program; None pushes nothing.

        If `run` raises, its program may not have used up the plan: nothing can be dispatched any more, unless the plan
        can be taken back.

        Args:
            plan: what the program's calls are to do.
            run: returns the order that the program returns, and anything else.
            may_take_back: whether no program that `run` has dispatched can be on its way to the plan.

        Raises:
            WscopeError: nothing can be dispatched any more, or a program that has run did not make its calls.
        """
        with self.lock:
            self.check_open()
            if plan is None:
                return run()[1]
            self._check_used_up()
            try:
                self._push(plan)
                self._order, out = run()
            except BaseException as error:
                if isinstance(error, Exception) and may_take_back() and self._queue.take_back():
                    self.tickets -= plan.num_stores
                    raise
                self._ended = self.failure or f"a program failed to start: {error}"
                if self.failure is not None and isinstance(error, Exception):
                    raise self._refusal() from error
                raise
            self._plan = plan
            self._check_used_up()
            return out

    def _check_used_up(self) -> None:
        """Raises if the last program has run and left calls of its plan unmade; does not wait for it.

        On every platform a program's calls are over when its arrays are ready.
        """
        order, plan = self._order, self._plan
        if self._queue.idle or order is None or order.is_deleted() or not order.is_ready():
            return
        if self._queue.idle or plan is None:  # it may have ended between the two questions
            return
        self._ended = (
            f"a program did not make the calls of its plan ({len(plan.jobs)} host jobs, {len(plan.loads)} loads, "
            f"{plan.num_stores} stores), or did not return the views behind them"
        )
        raise self._refusal()

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
            WscopeError: a call failed or was not made, or the deadline passed.
        """
        stuck_s, completed = 0.0, self.completed
        while ticket > 0 and not self._queue.wait_completed(ticket, SLICE_S):
            self._check_used_up()
            # Before its store is reached a program may compute for minutes; only bytes under way can be stuck.
            is_moving = self._queue.staged_layers > 0 and self.completed == completed
            stuck_s, completed = (stuck_s + SLICE_S if is_moving else 0.0), self.completed
            if self.failure is None and self._ended is None and stuck_s < DEADLINE_S:
                continue
            self._ended = self._ended or self.failure or f"no store ended within {DEADLINE_S:.0f} s"
            self.is_told = True
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
        if self._ended is not None or self.failure is not None:
            raise self._refusal()

    def _refusal(self) -> WscopeError:
        self.is_told = True
        return WscopeError(f"cache: not usable any more: {self._ended or self.failure}")

    def set_fault(self, *, store_delay_ms: int = 0, job_delay_ms: int = 0) -> None:
        """Slows stores and host jobs down: for tests of timing."""
        self._queue.set_fault(
            store_delay_ms=integer("store_delay_ms", store_delay_ms, 0, MOST_DELAY_MS),
            job_delay_ms=integer("job_delay_ms", job_delay_ms, 0, MOST_DELAY_MS),
        )

    def close(self, *, over: bool = True) -> None:
        """Ends all work under way; may be called twice, and does nothing in a forked child.

        Args:
            over: no program makes further calls. Else nobody gets the number that they name, while a plan is not used
                up.
        """
        if forks.is_child():
            return
        with self.lock:
            if self._is_closed:
                return
            self._ended = self._ended or self.failure or "it was closed"
            self._is_closed = True
            self._queue.close(over=over)
            self._order = None


_started: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


@atexit.register
def _tell_failures() -> None:
    for dispatcher in [] if forks.is_child() else list(_started):
        if dispatcher.failure is not None and not dispatcher.is_told:
            log.warning("cache: a program failed: %s", dispatcher.failure)
