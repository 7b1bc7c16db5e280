"""Host memory of the two placed regions: address space for everything, pages committed ahead of need."""

import contextlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from wscope_jax import _ffi
from wscope_jax.errors import CapacityError
from wscope_jax.layout import Region
from wscope_jax.placement import HOST_REGIONS, Placement

log = logging.getLogger(__name__)

# Pages committed at a time: large enough for huge pages, small beside any budget.
COMMIT_BYTES: Final = 64 << 20


class HostPools:
    """The pools of UNPINNED and PINNED, `[layer][slot][one block]` each.

    Args:
        num_layers: layers that store blocks.
        block_bytes: bytes of one block of one layer.
        max_slots: slots that both regions together may commit.
        device: number of the CUDA device that streams PINNED, which is pinned for it; None = streamed by copies.
        slots_per_chunk: slots of PINNED that are streamed together; 0 where nothing is streamed.
    """

    def __init__(
        self,
        num_layers: int,
        block_bytes: int,
        max_slots: int,
        *,
        device: int | None = None,
        slots_per_chunk: int = 0,
    ) -> None:
        self.slot_bytes = num_layers * block_bytes
        self.max_slots = max_slots
        # A region commits a step ahead at most: what it has, the other cannot have.
        step = max(1, min(COMMIT_BYTES // self.slot_bytes, max_slots // 16))
        self._steps = {region: step for region in HOST_REGIONS}
        if device is not None and slots_per_chunk:
            # A copy to the device ends where what was pinned in one piece does, and small copies are slow: a chunk
            # should be one piece, or, where that is too much, a few equal ones.
            parts = -(-slots_per_chunk // max(1, max_slots // 8))
            self._steps[Region.PINNED] = -(-slots_per_chunk // parts)
        try:
            self._pools = {
                region: _ffi.Pool(
                    num_layers,
                    max(1, max_slots),
                    block_bytes,
                    device if region is Region.PINNED else None,
                )
                for region in HOST_REGIONS
            }
        except (
            MemoryError,
            ValueError,
            TypeError,
        ) as error:  # the last: beyond what the extension counts
            why = "" if isinstance(error, TypeError) else f" ({error})"
            raise CapacityError(
                f"host memory: no address space for {max_slots} blocks of {self.slot_bytes} bytes{why}; use fewer or "
                "shorter sequences"
            ) from error
        self._refused: dict[Region, str] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="wscope-commit")
        self._pending: dict[Region, Future[None]] = {}
        # Slots that each region has committed, or is about to.
        self._targets = dict.fromkeys(HOST_REGIONS, 0)

    def id(self, region: Region) -> int:
        """Number of the region's pool in plans."""
        return self._pools[region].id

    def pool(self, region: Region) -> _ffi.Pool:
        """The region's memory."""
        return self._pools[region]

    def has_room(self, region: Region, placement: Placement) -> bool:
        """Whether one more block may go to `region`, by the budget; see `make_room`."""
        if not placement.has_room(region):
            return False
        slots = placement.slot_lists[region]
        needed = slots.num_used + 1
        if slots.num_free > 0 or needed <= self._targets[region]:
            return True
        return needed <= self._room(region) and region not in self._refused

    def make_room(self, region: Region, placement: Placement) -> bool:
        """Gets the pages for one more block of `region`; false if the machine does not give them."""
        slots = placement.slot_lists[region]
        return slots.num_free > 0 or self._commit(region, slots.num_used + 1)

    def full(self, what: str) -> CapacityError:
        """The error that says why there is no room for `what`."""
        refusals = [self._refused[region] for region in HOST_REGIONS if region in self._refused]
        why = (
            refusals[0]
            if refusals
            else f"all {self.max_slots} blocks of the host regions are taken"
        )
        return CapacityError(
            f"host memory: no room for {what}: {why}; raise the budget, or use fewer or shorter sequences"
        )

    def _commit(self, region: Region, num_slots: int) -> bool:
        """Whether the region has, or now gets, pages for so many slots."""
        pool = self._pools[region]
        pending = self._pending.pop(region, None)
        if pending is not None and (not pending.done() or pool.committed < num_slots):
            pending.exception()  # wait; a refusal shows below as a pool that is still too small
        self._targets[region] = pool.committed
        if pool.committed < num_slots and not self._grow(region, num_slots):
            return False
        step = self._next_step(region)
        target = min(self._room(region), pool.committed + step)
        is_near = pool.committed - num_slots < step // 2
        if is_near and target > pool.committed and region not in self._refused:
            # Without another thread (the system may refuse one) pages are committed when they are needed.
            with contextlib.suppress(RuntimeError):
                self._pending[region] = self._executor.submit(pool.commit, target)
                self._targets[region] = target
        return True

    def _room(self, region: Region) -> int:
        """Slots that the region may commit: what the other has it cannot have, for the budget is one."""
        return self.max_slots - sum(n for r, n in self._targets.items() if r is not region)

    def _next_step(self, region: Region) -> int:
        """Slots to commit at a time: fewer when little of the budget is left, so that little of it lies idle."""
        spare = self.max_slots - sum(self._targets.values())
        return min(self._steps[region], spare // 4)

    def _grow(self, region: Region, num_slots: int) -> bool:
        # A refusal is final: to ask again for each block would take as long each time.
        room, pool = self._room(region), self._pools[region]
        if num_slots > room or region in self._refused:
            return False
        ahead = min(room, max(num_slots, pool.committed + self._next_step(region)))
        for target in dict.fromkeys((ahead, num_slots)):
            try:
                pool.commit(target)
            except MemoryError as error:
                refusal = str(error)
                self._steps[region] = 1  # little is left: no more than is needed from now on
            else:
                self._targets[region] = target
                return True
        log.warning(
            "%s: %s; blocks go to the other region, whose reader alone then sets the pace",
            region,
            refusal,
        )
        self._refused[region] = refusal
        return False

    def close(self) -> None:
        """Frees the memory. Nothing may be reading or writing it."""
        self._executor.shutdown(cancel_futures=True)
        for pool in self._pools.values():
            pool.close()
