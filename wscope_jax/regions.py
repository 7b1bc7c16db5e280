"""The memory of a cache, region by region, and the one way by which programs reach it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from wscope_jax import devices, forks
from wscope_jax.arguments import shown
from wscope_jax.dispatcher import Dispatcher
from wscope_jax.errors import CapacityError, UsageError, is_out_of_memory
from wscope_jax.footprint import Footprint
from wscope_jax.pools import HostPools
from wscope_jax.step_plan import StepPlan
from wscope_jax.views import CacheSpec, Views, empty_views

T = TypeVar("T")


class Regions:
    """UNPINNED and PINNED as pools, WINDOW and PING-PONG as views, and the dispatcher of the programs over them.

    Args:
        size: of the cache: one stream a layer, all of one layout.
        slots: blocks that both host regions together may hold.
        storage: dtype name of entries.

    Attributes:
        pools: memory of the host regions.
        dispatcher: of programs.
        views: as the next program will get them.

    Raises:
        CapacityError: the memory is refused.
    """

    def __init__(self, size: Footprint, slots: int, *, storage: str) -> None:
        (stream,) = size.streams[0]
        num_layers, slots_per_chunk = len(size.streams), size.slots_per_chunk(stream)
        self.pools = HostPools(
            num_layers,
            size.block_bytes(stream),
            slots,
            device=devices.cuda_number(),
            slots_per_chunk=slots_per_chunk,
        )
        with self._closing_on_error(size):
            self.dispatcher = Dispatcher(self.pools)
            spec = CacheSpec(
                engine=self.dispatcher.engine,
                block=size.window,
                capacity=size.ring_entries(stream),
                spare_blocks=size.spare_blocks,
                storage=storage,
                uses_host=size.uses_host,
                uses_link=size.uses_link,
            )
            self.views = empty_views(
                stream.layout,
                spec,
                num_layers=num_layers,
                batch=size.batch,
                num_turns=1 if slots_per_chunk else 0,
                slots_per_chunk=slots_per_chunk,
            )

    @contextlib.contextmanager
    def _closing_on_error(self, size: Footprint) -> Iterator[None]:
        """Frees what the constructor took so far, if what comes now fails."""
        try:
            yield
        except BaseException as error:
            if hasattr(self, "dispatcher"):
                self.dispatcher.close()
            self.pools.close()
            if is_out_of_memory(error):
                raise CapacityError(
                    f"window: no memory for the rings of {size.batch} rows of {size.max_len} tokens and the chunks "
                    f"that are streamed ({error}); use fewer or shorter sequences, less spare_memory, or a "
                    "smaller window"
                ) from error
            raise

    def dispatch(self, plan: StepPlan | None, fn: Callable[[Views], tuple[Views, T]]) -> T:
        """Dispatches a program that takes the views (donated) and returns them and anything else.

        If `fn` raises before a program has taken the views, nothing has happened.

        Args:
            plan: what the program's calls are to do; None if it makes none.
            fn: runs the program.

        Raises:
            UsageError: `fn` is no function, or the program did not return views, or not advanced ones.
            WscopeError: see `Dispatcher.dispatch`.
        """
        if not callable(fn):
            raise UsageError(
                f"fn: expected a function of the views that runs a program, got {shown(fn)}"
            )

        def run() -> tuple[jax.Array, tuple[Views, T]]:
            views, out = fn(self.views)
            if not isinstance(views, Views) or views.attended:
                # Its calls are made all the same, and nobody else could wait for them.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    jax.block_until_ready((views, out))
                raise UsageError(
                    "views: the program must return (views, out), and a step views.advance()"
                )
            return views.shared.order, (views, out)

        before = self.views.shared.order
        self.views, out = self.dispatcher.dispatch(
            plan, run, may_take_back=lambda: not before.is_deleted()
        )
        return out

    def wait(self) -> None:
        """Returns when the program that was dispatched last has ended.

        Raises:
            WscopeError: it has failed.
        """
        try:
            jax.block_until_ready(self.views.shared)
        except jax.errors.JaxRuntimeError:
            self.dispatcher.check_open()
            raise

    def close(self) -> None:
        """Ends all work under way and frees the memory, the device's too; may be called twice.

        In a forked child it does nothing: threads and memory are the parent's.
        """
        if forks.is_child():
            return
        order = self.views.shared.order
        # To a program, an eviction too, that was interrupted when it was dispatched, or failed to start.
        is_lost = order.is_deleted()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a failed step was reported already
            if not is_lost:
                jax.block_until_ready(order)
        self.dispatcher.close(over=not is_lost)
        for array in jax.tree.leaves(self.views):  # whoever still refers to the cache
            if not array.is_deleted():
                array.delete()
        self.pools.close()
