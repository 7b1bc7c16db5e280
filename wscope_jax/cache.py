"""InplaceKVCache: the cache manager, outside the jitted step. It decides; the calls inside the step move."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp

from wscope_jax.arguments import instance, integer, shown
from wscope_jax.compiled import CompiledPrograms
from wscope_jax.decoding import Decoding
from wscope_jax.errors import UsageError
from wscope_jax.evictions import Evictions
from wscope_jax.footprint import CHUNK_ENTRIES, Footprint
from wscope_jax.layout import Region, Stream, check_layers, check_window
from wscope_jax.placement import HOST_REGIONS, Placement
from wscope_jax.policies import Policy, answers, require
from wscope_jax.prompts import Prompts
from wscope_jax.regions import Regions
from wscope_jax.views import CacheSpec, Views
from wscope_jax.work import Work

T = TypeVar("T")


class InplaceKVCache:
    """KV cache of a batch of sequences in four regions, each byte placed once, when it is written.

    Use: `begin_prompt`, `write_prompt` for every layer, `end_prompt` for each row; then `step` for each token;
    `release` a row that has ended; `close` at the end, or use it as a context manager.

    Args:
        streams: per layer what it stores, e.g. `model.streams`.
        policy: decides where each full block goes.
        batch: rows.
        max_len: tokens that a row may hold.
        window: D, entries in a block and in the window before it gives a block away.
        dtype: storage of entries, "float32" or "bfloat16".
        host_memory: bytes for both host regions together and the buffers that blocks pass through; None = as many as
            `batch` rows of `max_len` need.
        chunk_entries: entries of one layer in a streamed chunk.
        spare_memory: bytes on the device that windows may take beyond D, in whole blocks of all rows and layers. What
            they keep is neither streamed nor read by the CPU.
        compiled: programs to share with other caches of equal shapes.

    Attributes:
        placement: which block lives where.
        policy: as updated by what was measured.
        work: what CPU and link have done in the steps so far.

    Raises:
        UsageError: an impossible argument.
        CapacityError: not even one block fits into `host_memory`.
    """

    def __init__(
        self,
        streams: Sequence[Sequence[Stream]],
        *,
        policy: Policy,
        batch: int,
        max_len: int,
        window: int = 256,
        dtype: str = "float32",
        host_memory: int | None = None,
        chunk_entries: int = CHUNK_ENTRIES,
        spare_memory: int = 0,
        compiled: CompiledPrograms | None = None,
    ) -> None:
        window = check_window(window)
        batch, max_len = integer("batch", batch, 1), integer("max_len", max_len, 1)
        policy = require(policy)
        if not isinstance(dtype, str) or dtype not in ("float32", "bfloat16"):
            raise UsageError(
                f"dtype: entries are stored as float32 or bfloat16, got {shown(dtype)}"
            )
        if host_memory is not None:
            host_memory = integer("host_memory", host_memory, 0)
        stream = _only_stream(streams)
        self.layout = stream.layout
        self.num_layers = len(streams)
        self.batch = batch
        self.max_len = max_len
        self.block = window
        self.policy = policy
        self.work = Work()
        self.compiled = CompiledPrograms() if compiled is None else compiled
        instance("compiled", self.compiled, CompiledPrograms, "CompiledPrograms() or None")
        size = Footprint(
            streams=tuple(map(tuple, streams)),
            batch=batch,
            max_len=max_len,
            window=window,
            itemsize=jnp.dtype(dtype).itemsize,
            uses_host=policy.uses_host,
            uses_link=policy.uses_link,
            chunk_entries=chunk_entries,
            spare_memory=spare_memory,
        )
        self.entry_bytes = size.entry_bytes(stream)
        self.slots_per_chunk = size.slots_per_chunk(stream)
        places = policy.uses_host or policy.uses_link
        slots = size.require_slots(host_memory) if places else 0
        # First what needs memory: a batch for which there is none would take minutes to list.
        self._regions = Regions(size, slots, storage=dtype)
        self.placement = Placement(batch, window, slots, spare_blocks=size.spare_blocks)
        self._dispatcher, self._pools = self._regions.dispatcher, self._regions.pools
        self._evictions = Evictions(self.placement, self._regions, self.compiled, self._route)
        self._decode = Decoding(
            self.placement,
            self._regions,
            self._evictions,
            policy.schedule.jobs(self.num_layers, batch),
            max_len=max_len,
        )
        self._prompts = Prompts(
            self.placement,
            self._pools,
            self._route,
            num_layers=self.num_layers,
            max_len=max_len,
        )

    # --- what it says of itself ---------------------------------------------------------------

    @property
    def spec(self) -> CacheSpec:
        """Static facts that programs over this cache are traced with."""
        return self._regions.views.spec

    @property
    def views(self) -> Views:
        """The views as the next program will get them, to trace and compile with."""
        return self._regions.views

    @property
    def num_turns(self) -> int:
        """Link calls a layer and step: the bucket that the next step must be compiled for."""
        return self._decode.turns

    @property
    def num_chunks(self) -> int:
        """Chunks that hold a live block: how much of the turns is used."""
        return self._decode.num_chunks

    @property
    def most_turns(self) -> int:
        """Turns that this cache can ever need."""
        return self._decode.most_turns

    @property
    def layers_in_flight(self) -> int:
        """High-water mark of layers whose entries were alive outside their home at the same time."""
        return self._dispatcher.staged_high_water

    @property
    def active_rows(self) -> list[int]:
        """Rows that decode."""
        return self._decode.rows

    def holds(self, row: int) -> bool:
        """Whether `row` holds a sequence."""
        return self.placement.rows[self.placement.index(row)].is_live

    def length(self, row: int) -> int:
        """Tokens of `row`."""
        return self.placement.rows[self.placement.index(row)].length

    def row_tokens(self, row: int) -> dict[Region, int]:
        """Tokens of `row` by region."""
        row = self.placement.index(row)
        placed = {r: self.placement.num_blocks(row, r) * self.block for r in HOST_REGIONS}
        return {**placed, Region.WINDOW: self.placement.window_length(row)}

    def cpu_share(self) -> float:
        """The share r that the policy aims at for the blocks that are placed and those on their way."""
        return answers.cpu_share(self.policy, self.placement.expected_blocks * self.block)

    def is_full(self, row: int) -> bool:
        """Whether `row` cannot take another token: it holds `max_len`, or its window is full and nothing has room.

        The latter may end when another row is released.
        """
        row = self.placement.index(row)
        if self.placement.rows[row].length >= self.max_len:
            return True
        if self.placement.window_length(row) < self.spec.capacity or row in self._evictions:
            return False
        return self._route(row) is None

    def set_fault(self, *, store_delay_ms: int = 0, job_delay_ms: int = 0) -> None:
        """Slows stores and host jobs down: for tests of timing."""
        self._dispatcher.set_fault(store_delay_ms=store_delay_ms, job_delay_ms=job_delay_ms)

    # --- prompts ------------------------------------------------------------------------------

    def begin_prompt(self, row: int, length: int) -> None:
        """Starts a sequence of `length` tokens in `row` and decides where its blocks go.

        Raises:
            UsageError: no such row, the row holds a sequence, or a length beyond `max_len`.
            CapacityError: the host regions have no room for it; the row stays empty.
        """
        with self._dispatcher.lock:
            self._dispatcher.check_open()
            self._decode.outdate()  # the row's slots may have been another's
            self._prompts.begin(self.placement.index(row), length, self.spec)

    def write_prompt(
        self, row: int, layers: Sequence[int], fn: Callable[[Views], tuple[Views, T]]
    ) -> T:
        """Dispatches a program that calls `attend_prompt` for `layers`, in that order, once each.

        Waits until at most LAYERS_IN_FLIGHT layers' entries are on their way, this program's included.

        Args:
            row: row that `begin_prompt` was called for.
            layers: layers that the program covers.
            fn: runs the program: takes the views (donated) and returns them and anything else.

        Raises:
            UsageError: the row has no prompt under way, or a layer is out of range or comes twice.
            WscopeError: a program before it did not make the calls of its plan.
        """
        with self._dispatcher.lock:
            self._dispatcher.check_open()
            row = self.placement.index(row)
            layers = self._prompts.check(row, layers)
            plan = None
            if self.spec.has_calls:
                plan, ahead = self._prompts.plan(row, layers, self.spec)
                self._dispatcher.wait(self._dispatcher.tickets - ahead)
            out = self._regions.dispatch(plan, fn)
            self._prompts.written(row, layers)
            return out

    def end_prompt(self, row: int) -> None:
        """Waits until the prompt's blocks are in their homes; from now on `row` decodes.

        Raises:
            UsageError: the row has no prompt under way, or a layer is not written.
            WscopeError: a program did not make the calls of its plan.
        """
        with self._dispatcher.lock:
            self._dispatcher.check_open()
            row = self.placement.index(row)
            self._prompts.check_whole(row)
            self._dispatcher.wait(self._dispatcher.tickets)
            self._prompts.forget(row)
            self._decode.add(row)

    # --- decode -------------------------------------------------------------------------------

    def prepare_step(self) -> Views:
        """Brings placement and operands up to date and returns the views that the next `step` passes.

        Raises:
            CapacityError: an active row cannot take another token (see `is_full`).
        """
        with self._dispatcher.lock:
            self._dispatcher.check_open()
            self._decode.prepare()
            return self._regions.views

    def step(self, fn: Callable[[Views], tuple[Views, T]]) -> T:
        """Dispatches one decode step: one new token in every active row.

        Args:
            fn: runs the jitted step: takes the views (donated) and returns them, advanced, and anything else.

        Raises:
            UsageError: no row decodes, or the program did not advance the views.
            CapacityError: see `prepare_step`.
            WscopeError: this program or the one before did not make the calls of its plan. It is told as soon as it
                is known without a wait: by the next call at the latest.
        """
        with self._dispatcher.lock:
            self.prepare_step()
            if not self.active_rows:
                raise UsageError("step: no row decodes; write a prompt and call end_prompt first")
            out = self._regions.dispatch(self._decode.plan if self.spec.has_calls else None, fn)
            for row in self.active_rows:
                self.placement.append(row)
            self._evictions.start_due(self.active_rows)
            for timing in self._dispatcher.timings(self._decode.num_jobs):
                self.policy = answers.observe(self.policy, timing)
                self.work = self.work.after(timing)
            return out

    def release(self, row: int) -> None:
        """Ends the sequence of `row` and frees its slots, once the last step that read them has ended.

        Raises:
            UsageError: the row holds no sequence.
            WscopeError: a step has failed.
        """
        with self._dispatcher.lock:
            self._dispatcher.check_open()
            row = self.placement.index(row)
            self._regions.wait()
            self._prompts.forget(row)
            self._evictions.forget(row)
            self.placement.release(row)
            self._decode.drop(row)

    def compile_evict(self) -> None:
        """Compiles the program that moves a block out of the window, before it is needed."""
        self._evictions.compile()

    # --- inside -------------------------------------------------------------------------------

    def _route(self, row: int) -> Region | None:
        uses = {Region.UNPINNED: self.policy.uses_host, Region.PINNED: self.policy.uses_link}
        room = {r: used and self._pools.has_room(r, self.placement) for r, used in uses.items()}
        while True:
            occupancy = self.placement.occupancy(
                row, unpinned_room=room[Region.UNPINNED], pinned_room=room[Region.PINNED]
            )
            region = answers.route(self.policy, occupancy)
            if region is None or self._pools.make_room(region, self.placement):
                return region
            room[region] = False

    def close(self) -> None:
        """Ends all work under way and frees the host memory; may be called twice.

        In a forked child it does nothing: threads and memory are the parent's.
        """
        self._regions.close()

    def __enter__(self) -> "InplaceKVCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _only_stream(streams: Sequence[Sequence[Stream]]) -> Stream:
    check_layers(streams)
    layouts = {stream.layout for layer in streams for stream in layer}
    if any(len(layer) != 1 for layer in streams) or len(layouts) != 1:
        raise UsageError("streams: a cache holds one stream in every layer, all of one layout")
    if (tokens := streams[0][0].layout.tokens_per_entry) != 1:
        raise UsageError(f"streams: a cache holds an entry for each token, got one for {tokens}")
    return streams[0][0]
