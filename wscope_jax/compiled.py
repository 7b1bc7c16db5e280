"""Compiled programs by key, and the count of when they were compiled.

In steady state nothing may be compiled: a program that is missing then is a stall, and the engine's tests assert that
there is none. What will be needed soon is compiled ahead on a thread of its own.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

Compiled = Callable[..., Any]


class Programs:
    """Ahead-of-time compiled programs of one engine.

    Attributes:
        compiles: how many programs were compiled in each phase: "warmup" (before `is_steady` was set), "ahead" (on
            the background thread), "stall" (in steady state, while the caller waited).
        is_steady: set by the engine once it decodes.
    """

    def __init__(self) -> None:
        self.compiles = {"warmup": 0, "ahead": 0, "stall": 0}
        self.is_steady = False
        self._compiled: dict[Hashable, Compiled] = {}
        self._ahead: dict[Hashable, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

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
        with self._lock:
            if key in self._compiled:
                return self._compiled[key]
            pending = self._ahead.pop(key, None)
        if pending is not None:
            if self.is_steady and not pending.done():
                self.compiles["stall"] += 1
            compiled = pending.result()
        else:
            self.compiles["stall" if self.is_steady else "warmup"] += 1
            compiled = _compile(fn, args, donate)
        with self._lock:
            self._compiled[key] = compiled
        return compiled

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
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with self._lock:
            if key in self._compiled or key in self._ahead:
                return
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="wscope-compile")
            try:
                self._ahead[key] = self._executor.submit(_compile, fn, shapes, donate)
            except (
                RuntimeError
            ):  # the system refuses the thread: `get` compiles it when it is needed
                return
            self.compiles["ahead"] += 1

    def settle(self) -> None:
        """Waits until everything that is compiled ahead is there."""
        with self._lock:
            pending = list(self._ahead.values())
        for future in pending:
            future.exception()

    def close(self, *, wait: bool = True) -> None:
        """Stops the background thread; waits for a compilation that has begun if `wait`."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=True)


def _compile(fn: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...]) -> Compiled:
    return jax.jit(fn, donate_argnums=donate).lower(*args).compile()
