"""Compiled programs by key, and the count of when they were compiled.

In steady state nothing may be compiled: a program that is missing then is a stall, and the engine's tests assert that
there is none. What will be needed soon is compiled ahead on a thread of its own.
"""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import jax

LEAST_PRIORITY: Final = 19
SHORT_TURN_S: Final = 0.0005  # that a thread holds Python's lock while another one waits for it

COMPILER_OPTIONS: Final = {"xla_gpu_graph_min_graph_size": 2}
"""For `jax.jit` of a program that calls `attend`: on a GPU XLA launches fewer than five kernels one by one, and that is
what lies between the calls of a layer. As graphs an empty host part adds 11 us to a layer at batch 1 and 17 at batch
32, else 29 and 50 (NVIDIA H200; docs/log.md)."""

Compiled = Callable[..., Any]


@dataclasses.dataclass
class _Store:
    """Programs by key, shared by all calls of an engine; a future that is not done is being compiled."""

    futures: dict[Hashable, Future[Compiled]] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    executor: ThreadPoolExecutor | None = None


class CompiledPrograms:
    """Ahead-of-time compiled programs, each compiled once, and what one call had compiled.

    Attributes:
        compiles: how many programs this call had compiled in each phase: "warmup" (before `is_steady` was set),
            "ahead" (on the background thread), "stall" (in steady state, while the caller waited).
        is_steady: set by a call once it decodes.
    """

    def __init__(self, store: _Store | None = None) -> None:
        self.compiles = {"warmup": 0, "ahead": 0, "stall": 0}
        self.is_steady = False
        self._store = store or _Store()

    def for_call(self) -> "CompiledPrograms":
        """The same programs, with a count and a phase of their own."""
        return CompiledPrograms(self._store)

    def __contains__(self, key: Hashable) -> bool:
        """Whether the program is there or on its way."""
        return key in self._store.futures

    def get(
        self,
        key: Hashable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...] = (),
    ) -> Compiled:
        """The compiled form of `fn` for arguments of the shapes of `args`.

        Args:
            key: names program and shapes; equal keys must mean equal programs.
            fn: a function of pytrees of arrays.
            args: arrays or `jax.ShapeDtypeStruct`s.
            donate: numbers of the arguments whose buffers the program may take over.
        """
        with self._store.lock:
            future = self._store.futures.get(key)
            is_mine = future is None
            if future is None:
                future = self._store.futures[key] = Future()
        if is_mine:
            self.compiles["stall" if self.is_steady else "warmup"] += 1
            self._compile(key, future, fn, args, donate)
        elif self.is_steady and not future.done():
            self.compiles["stall"] += 1
        return future.result()

    def call(
        self,
        key: Hashable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Runs the compiled form of `fn` on `args`; see `get`."""
        return self.get(key, fn, args, donate)(*args)

    def prepare(
        self,
        key: Hashable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...] = (),
    ) -> None:
        """Compiles a program on the background thread, so that a later `get` finds it."""
        if key in self:
            return
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        store = self._store
        with store.lock:
            if key in store.futures:
                return
            if store.executor is None:
                store.executor = ThreadPoolExecutor(
                    1, thread_name_prefix="wscope-compile", initializer=_let_others_go_first
                )
            future: Future[Compiled] = Future()
            try:
                store.executor.submit(self._compile_ahead, key, future, fn, shapes, donate)
            except (
                RuntimeError
            ):  # the system refuses the thread: `get` compiles it when it is needed
                return
            store.futures[key] = future
            self.compiles["ahead"] += 1

    def _compile_ahead(self, *args: Any) -> None:
        """Compiles while steps go on. Tracing holds Python's lock, and a step waits for it several times."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SHORT_TURN_S))
        try:
            self._compile(*args)
        finally:
            sys.setswitchinterval(before)

    def _compile(
        self,
        key: Hashable,
        future: Future[Compiled],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...],
    ) -> None:
        """Compiles a program into its future; one that fails may be tried again."""
        try:
            future.set_result(
                jax.jit(fn, donate_argnums=donate, compiler_options=COMPILER_OPTIONS)
                .lower(*args)
                .compile()
            )
        except BaseException as error:
            with self._store.lock:
                self._store.futures.pop(key, None)
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def settle(self) -> None:
        """Waits until everything that is compiled ahead is there."""
        with self._store.lock:
            pending = list(self._store.futures.values())
        for future in pending:
            future.exception()

    def close(self, *, wait: bool = True) -> None:
        """Stops the background thread; waits for a compilation that has begun if `wait`."""
        with self._store.lock:
            executor, self._store.executor = self._store.executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=True)


def _let_others_go_first() -> None:
    """Lowers the priority of this thread and of those that it starts: steps go on meanwhile, on the same cores."""
    with contextlib.suppress(AttributeError, OSError):  # a system that has no priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
