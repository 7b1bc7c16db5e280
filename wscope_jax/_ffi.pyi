"""The C++ side: host memory, workers, and the targets that compiled programs call.

Everything here is usable from any thread. After `fork()` the threads are gone: a child gets a
RuntimeError from whatever needs them.
"""

from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

_Int32s: TypeAlias = npt.NDArray[np.int32]

@final
class Pool:
    """Memory of a host region, `[layer][slot][one block]`, shared with plans by its number.

    The address space of all slots is reserved at once; slots become usable ("committed") in steps
    and never move. The memory outlives the object as long as a plan, a store under way or a view
    needs it.
    """

    def __init__(
        self, num_layers: int, max_slots: int, block_bytes: int, device: int | None = None
    ) -> None:
        """Reserves address space; takes no memory.

        Args:
            num_layers: layers, at least 1.
            max_slots: slots per layer, at least 1.
            block_bytes: bytes of one block of one layer, at least 1.
            device: number of the CUDA device to pin for all that is committed; None = not pinned.

        Raises:
            ValueError: a number is below 1 or their product overflows 64 bits.
            MemoryError: the system refuses the address space.
        """

    @property
    def id(self) -> int:
        """Number in plans, the lowest that was free. Valid after `close` too, but then stale."""

    @property
    def committed(self) -> int:
        """Slots per layer that are usable: [0, committed)."""

    @property
    def num_layers(self) -> int:
        """Layers."""

    @property
    def max_slots(self) -> int:
        """Slots per layer that there can be."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""

    @property
    def device(self) -> int | None:
        """Number of the CUDA device that the memory is pinned for."""

    def commit(self, num_slots: int) -> None:
        """Makes slots [0, num_slots) of every layer usable; they are zero.

        The workers touch the pages, in small jobs between those of steps. Never shrinks: a smaller
        number does nothing. Releases the GIL.

        Raises:
            ValueError: the number is not in [0, max_slots], or the pool is closed.
            MemoryError: the machine has not enough memory; `committed` is what it was.
            RuntimeError: this process was forked.
        """

    def view(self, layer: int, slot: int) -> npt.NDArray[np.uint8]:
        """Bytes of one block, uint8 [block_bytes]: aliases the pool and keeps its memory alive.

        Raises:
            IndexError: no such layer, or the slot is not committed.
            ValueError: the pool is closed.
        """

    def mapped(self, layer: int, num_heads: int, storage: str) -> object:
        """The committed slots of a layer, [1, committed, num_heads, rest of a block], as a DLPack capsule.

        Its device is the one that the pool is pinned for, which reads over the link, or the CPU. It
        aliases the pool and keeps its memory alive, which goes, unpinned, with the last array over
        it: nothing may read that then.

        Raises:
            ValueError: no such layer or storage, nothing is committed, num_heads does not divide a
                block, a layer has 2^31 numbers or more, or the pool is closed.
        """

    def close(self) -> None:
        """Gives up the number and this hold on the memory; a second call does nothing."""

@final
class StepQueue:
    """One engine's plans and the counters of what became of them.

    A plan is pushed before its program is dispatched; the program's calls use it up in order. The
    first call that fails poisons the queue for good.
    """

    def __init__(self) -> None:
        """Takes the lowest free number and starts the thread that moves stored blocks.

        Raises:
            RuntimeError: the system refuses the thread.
        """

    @property
    def id(self) -> int:
        """The number that programs carry as the attribute `engine`."""

    def push(
        self,
        jobs: _Int32s,
        host_pool: int,
        table_ptr: _Int32s,
        table: _Int32s,
        load_pool: int,
        loads: _Int32s,
        stores: _Int32s,
        moves: _Int32s,
    ) -> None:
        """Adds a plan. All arrays are copied.

        Args:
            jobs: int32 [J, 3], host jobs in the order of their starts: layer, first row, number of
                rows.
            host_pool: number of the pool that the jobs read; -1 = none, then `table` is empty.
            table_ptr: int32 [B + 1], where each row's slots begin in `table`.
            table: int32 [n], slots of row 0, row 1, ...; every layer uses the same.
            load_pool: number of the pool that the loads read; -1 = none, then no load has a slot.
            loads: int32 [M, 3], loads in order: layer, first slot, number of slots.
            stores: int32 [S, 2], stores in order: layer, number of moves.
            moves: int32 [X, 3], moves of all stores in order: block of the operand, pool, slot.

        Raises:
            ValueError: a number is out of range (the text names array, row and range), no open pool
                has the number, a slot is not committed, or the queue is closed.
            RuntimeError: the queue is poisoned, there are jobs with blocks and no workers, or this
                process was forked.
        """

    @property
    def idle(self) -> bool:
        """The current plan is used up, its jobs are ended, and nothing is pushed."""

    @property
    def handshake(self) -> str:
        """How the turn and the results pass between the GPU and the workers, and why so, in words.

        "stream memory operations", or "host callbacks (...)" where the device or its driver has
        none; then "; results come by a kernel", or "... copies (...)". Empty before the first call
        on a GPU.
        """

    @property
    def completed(self) -> int:
        """Stores whose bytes are all in place, since the queue was made: the ticket counter."""

    def wait_completed(self, ticket: int, timeout_s: float) -> bool:
        """Waits until `completed` has reached `ticket`, without the GIL.

        Returns:
            False if the time passed first, or if the queue is poisoned or closed and the ticket is
            not reached.
        """

    @property
    def staged_layers(self) -> int:
        """Layers of which blocks are under way: their copies outside the pools are alive."""

    @property
    def staged_high_water(self) -> int:
        """The most that `staged_layers` ever was."""

    @property
    def staged_bytes(self) -> int:
        """Bytes of the copies that are alive."""

    @property
    def poison(self) -> str | None:
        """Text of the first call that failed."""

    def take_back(self) -> bool:
        """Drops the plan that was pushed last, if its program has not begun; false if it has."""

    def drain_timings(self) -> npt.NDArray[np.int64]:
        """Sums of each finished plan that had jobs or loads, oldest first, int64 [n, 7].

        Columns: cpu_ns, from a job's first worker start to its last worker end; link_ns, from
        host_start's return to host_finish's entry (on this platform the time of everything that
        runs beside a job); link_idle_ns, what copies waited for a slot (on this platform the same
        as the next); wait_cpu_ns, what host_finish waited; wait_link_ns, what ended jobs waited
        for host_finish; host_entries, attended by the jobs; streamed_entries, copied by the loads.
        Entries are those of one layer, summed over the layers. The block size comes from the jobs,
        so a plan without jobs has 0 entries (and 0 ns). At most 256 plans are kept.
        """

    def set_fault(self, store_delay_ms: int = 0, job_delay_ms: int = 0) -> None:
        """Delays each later store, or the start of each later job that has blocks. For tests."""

    def close(self, over: bool = True) -> None:
        """Waits for open jobs and stores (at most 30 s) and gives up the number.

        Later calls of programs fail; a second close does nothing. Releases the GIL.

        Args:
            over: no program that was dispatched makes further calls. If not, and a plan is not used up, nobody gets
                the number any more; so it is where a queue is collected that was not closed.
        """

def registrations(platform: str) -> dict[str, object]:
    """The custom-call targets of the platform "cpu" or "CUDA": capsules by their names."""

def cuda_refusal() -> str:
    """Why the targets of "CUDA" cannot run here (no driver, or one that is too old); empty if they can."""

def start_workers(n: int) -> None:
    """Makes the process's worker pool `n` threads large; nothing happens if it is.

    If the system refuses some of the threads there are fewer: see `num_workers`.

    Raises:
        ValueError: n is below 1.
        RuntimeError: jobs are open, not one thread could be started, or this process was forked.
    """

def num_workers() -> int:
    """Threads of the worker pool; 0 before `start_workers`."""

def isas() -> list[str]:
    """Instruction sets whose kernels run on this processor, simplest first.

    The first call asks the system for the use of AMX.
    """

def amx_refusal() -> str:
    """Why AMX is not among `isas` although the processor has it; empty if it is or has not."""

def force_isa(name: str) -> None:
    """Makes one of `isas` the path of every shape; empty = the best one for each.

    To be called while no job is open.

    Raises:
        ValueError: no such name in this build.
        RuntimeError: the processor lacks it, or the system refuses it.
    """

def isa_of(
    num_q_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    value_in_key: bool,
    block: int,
    storage: str,
) -> str:
    """The instruction set whose kernel attends to this shape; see `time_attention` for the arguments.

    Chosen when a shape is first asked for or attended to, by a timing of some milliseconds.

    Raises:
        ValueError: a number makes no sense.
    """

def measure_attention(
    pool: Pool,
    layer: int,
    table: _Int32s,
    num_q_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    value_in_key: bool,
    block: int,
    storage: str,
    isa: str,
    prefetch_bytes: int = -1,
) -> tuple[int, int]:
    """Runs one host job on the real workers with the kernel of `isa`, for benchmarks.

    Args:
        pool: memory of the blocks.
        layer: layer of it.
        table: int32 [rows, blocks], slots of each row.
        num_q_heads: see `time_attention`, as the arguments that follow.
        num_kv_heads: kv heads.
        key_dim: numbers in a key.
        value_dim: numbers in a value.
        value_in_key: the value is in the key.
        block: entries in a block.
        storage: "float32" or "bfloat16".
        isa: one of `isas`.
        prefetch_bytes: how far ahead of its loads the kernel prefetches; -1 = as it finds best.

    Returns:
        Nanoseconds from the first worker's start to the last one's end, and CPU nanoseconds of the
        worker that took most.

    Raises:
        ValueError: an argument makes no sense.
        RuntimeError: there are no workers.
    """

def measure_rows(
    pool: Pool,
    layer: int,
    num_slots: int,
    num_q_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    value_in_key: bool,
    block: int,
    storage: str,
    isa: str,
) -> tuple[int, int]:
    """As `measure_attention` over slots [0, num_slots), had they been written in rows and were packed when read."""

def measure_read(
    pool: Pool, layer: int, num_slots: int, isa: str, prefetch_bytes: int = -1
) -> tuple[int, int]:
    """Reads slots [0, num_slots) on the real workers and does nothing with them: the ceiling.

    Returns and raises as `measure_attention`.
    """

def measure_streams(
    read_pool: Pool | None,
    link_pool: Pool | None,
    chunk_bytes: int,
    seconds: float,
    isa: str,
    device: int | None = None,
    link_rate: float | None = None,
) -> tuple[float, float]:
    """Lets the workers read a pool and the link copy another at the same time, over and over, for `seconds`.

    Args:
        read_pool: what the workers read; None = they rest.
        link_pool: what is copied chunk by chunk, from every layer's first committed slot on; None = nothing is.
        chunk_bytes: bytes of a copy.
        seconds: how long, at most 60.
        isa: one of `isas`, whose loads the workers use.
        device: number of the CUDA device to copy to, which `link_pool` must be pinned for; None = to memory.
        link_rate: bytes a second that the copies may take, few at a time; what they fall behind they do not catch up
            with, but for one copy. None = as fast as it goes.

    Returns:
        Bytes a second of the readers, and of the link until its last copy ended.

    Raises:
        ValueError: an argument makes no sense.
        MemoryError: the machine has not enough memory.
        RuntimeError: there are no workers, or a copy failed.
    """

def time_attention(
    num_q_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    value_in_key: bool,
    block: int,
    storage: str,
    num_blocks: int,
) -> float:
    """Nanoseconds of one host job over `num_blocks` blocks of one row, on the real workers.

    The median of a few after a first one, over memory of its own that no cache holds. Releases the GIL.

    Args:
        num_q_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: kv heads.
        key_dim: numbers in a key.
        value_dim: numbers in a value.
        value_in_key: the value is the first value_dim numbers of the key.
        block: entries in a block.
        storage: "float32" or "bfloat16".
        num_blocks: blocks, at least 1.

    Raises:
        ValueError: a number makes no sense.
        MemoryError: the machine has not enough memory.
        RuntimeError: there are no workers.
    """

def time_load(device: int, num_bytes: int) -> float:
    """Nanoseconds of a copy of `num_bytes` from pinned memory to a CUDA device; the median of a few.

    Raises:
        RuntimeError: there is no driver, no such device, or no room.
    """

def time_copy(num_bytes: int) -> float:
    """Nanoseconds of one copy of that size, from memory to memory, by the calling thread: the median of a few.

    Raises:
        ValueError: num_bytes is below 1.
        MemoryError: the machine has not enough memory.
    """
