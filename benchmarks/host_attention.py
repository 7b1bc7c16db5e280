"""How near to the speed of memory does the CPU's attention come?

Per shape and in one run, in turns of random order, each time over a randomly chosen layer of a working set larger than
the caches: reading alone (the ceiling, with the widest loads and prefetch), the kernel of every instruction set that
runs here, what each of its choices is worth (prefetch, huge pages), and other implementations that can be imported.
GB/s of stored bytes. One worker is timed by its CPU time, several by the wall clock.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for torch too

import argparse
import ctypes
import faulthandler
import importlib.util
import random
import threading
import time
from typing import Any, Final

import ml_dtypes
import numpy as np
import options
import peers
import record

from tests.cases import CASES, Case
from wscope_jax import _ffi

BLOCK: Final = 256
ROWS: Final = 4  # sequences
PEER_CASES: Final = ("gqa8_d128", "gqa4_d128", "mla16_576")  # that other implementations know
CASE_NAMES: Final = (*PEER_CASES, "v4_64_512")
PEERS: Final = ("torch", "vllm", "sglang", "jax")  # how the names of their rows begin
BESIDE_TORCH: Final = " beside torch"  # in the rows of ours that are measured in turns with theirs
SMALL_PAGES: Final = " 4k pages"
SETTLE_S: Final = 0.2  # until threads of theirs sleep, which spin for their next work
PR_SET_THP_DISABLE: Final = 41


def shape_of(case: Case, storage: str) -> tuple[int, int, int, int, bool, int, str]:
    """A case as the extension takes it."""
    layout = case.layout
    dims = (layout.key_dim, layout.value_dim, layout.value_in_key)
    return case.num_q_heads, layout.num_kv_heads, *dims, BLOCK, storage


class Setup:
    """A pool of some layers with random blocks, all of a case's shape."""

    def __init__(self, case: Case, storage: str, slice_bytes: int, layers: int) -> None:
        self.case, self.storage = case, storage
        dtype = np.dtype(np.float32 if storage == "float32" else ml_dtypes.bfloat16)
        layout = case.layout
        block_bytes = BLOCK * layout.entry_bytes(dtype.itemsize)
        self.blocks = max(1, slice_bytes // block_bytes // ROWS)
        slots = self.blocks * ROWS
        self.layers, self.bytes = layers, slots * block_bytes
        self.pool = _ffi.Pool(layers, slots, block_bytes)
        self.pool.commit(slots)
        draw = np.random.default_rng(0)
        some = [
            draw.standard_normal(block_bytes // dtype.itemsize, np.float32)
            .astype(dtype)
            .view(np.uint8)
            for _ in range(8)
        ]
        for layer in range(layers):
            for slot in range(slots):
                self.pool.view(layer, slot)[:] = some[(5 * layer + slot) % len(some)]
        self.table = np.arange(slots, dtype=np.int32).reshape(ROWS, -1)

    def read(self, clock: int, prefetch_bytes: int = -1) -> peers.Timed:
        """Reading a layer and nothing else; `clock`: 0 wall, 1 CPU."""
        isa = _ffi.isas()[-1]
        return lambda: (
            1e-9
            * _ffi.measure_read(
                self.pool, random.randrange(self.layers), self.table.size, isa, prefetch_bytes
            )[clock]
        )

    def rows(self, isa: str, clock: int) -> peers.Timed:
        """The same kernel, had the blocks been written in rows: each is packed when it is read."""
        return lambda: (
            1e-9
            * _ffi.measure_rows(
                self.pool,
                random.randrange(self.layers),
                self.table.size,
                *shape_of(self.case, self.storage),
                isa,
            )[clock]
        )

    def kernel(self, isa: str, clock: int, prefetch_bytes: int = -1) -> peers.Timed:
        """The kernel of one instruction set over a layer."""
        return lambda: (
            1e-9
            * _ffi.measure_attention(
                self.pool,
                random.randrange(self.layers),
                self.table,
                *shape_of(self.case, self.storage),
                isa,
                prefetch_bytes,
            )[clock]
        )


class Link:
    """Copies host memory to the GPU without a pause, on a thread of its own."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.host = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
        self.device = torch.empty_like(self.host, device="cuda")
        self.copied = 0
        self.stop = threading.Event()

    def _run(self) -> None:
        while not self.stop.is_set():
            self.device.copy_(self.host, non_blocking=True)
            self.torch.cuda.synchronize()
            self.copied += self.host.numel()

    def rate(self, run: peers.Timed | None, seconds: float, num_bytes: int) -> tuple[float, float]:
        """GB/s of `run` (0 for None) and of the link while both go on."""
        self.stop.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        began, before, rates = time.perf_counter(), self.copied, []
        while time.perf_counter() - began < seconds:
            if run is None:
                time.sleep(seconds / 10)
            else:
                rates.append(1e-9 * num_bytes / run())
        link = 1e-9 * (self.copied - before) / (time.perf_counter() - began)
        self.stop.set()
        thread.join()
        return (float(np.median(rates)) if rates else 0.0), link


def with_link(setup: Setup, name: str, best: str, quick: bool) -> list[dict[str, Any]]:
    """Kernel and link together, against a pure reader and the link together."""
    link = Link()
    seconds = 0.3 if quick else 0.6
    totals: dict[str, list[float]] = {"streaming_read+link": [], f"wscope/{best}+link": []}
    for _ in range(2 if quick else 4):
        for which, run in zip(totals, (setup.read(0), setup.kernel(best, 0)), strict=True):
            cpu, gpu = link.rate(run, seconds, setup.bytes)
            totals[which].append(cpu + gpu)
    ceiling = float(np.median(totals["streaming_read+link"]))
    return [record.row(name, which, rates, "GB/s", ceiling) for which, rates in totals.items()]


def best_isa(case: Case, storage: str) -> str:
    return _ffi.isa_of(*shape_of(case, storage))


def own_isas(case: Case, storage: str) -> list[str]:
    """Those with a kernel for this storage; others hand it to the one of another set."""
    own = []
    for isa in _ffi.isas():
        _ffi.force_isa(isa)
        if _ffi.isa_of(*shape_of(case, storage)) == isa:
            own.append(isa)
    _ffi.force_isa(os.environ.get("WSCOPE_ISA", ""))
    return own


def sample(runs: dict[str, peers.Timed], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of every run in every round, in random order, peers last; what takes long is run three times only."""
    rates: dict[str, list[float]] = {key: [] for key in runs}
    slow: set[str] = set()
    for number in range(1 + rounds):
        if any(key.startswith(PEERS) for key in runs):
            time.sleep(SETTLE_S)
        for key in sorted(runs, key=lambda key: (key.startswith(PEERS), random.random())):
            if key in slow and number > 3:
                continue
            seconds = runs[key]()
            if seconds > 0.5:
                slow.add(key)
            if number > 0:
                rates[key].append(1e-9 * num_bytes / seconds)
    return rates


def rows_of(
    label: str, rates: dict[str, list[float]], threads: int, chosen: str
) -> list[dict[str, Any]]:
    """The rows of one case; the best way of reading is the ceiling."""
    reads = (values for key, values in rates.items() if key.startswith("streaming_read"))
    ceiling = max(float(np.median(values)) for values in reads)
    extra = {"threads": threads, "clock": "cpu" if threads == 1 else "wall"}
    return [
        record.row(label, key, values, "GB/s", ceiling)
        | extra
        | {"chosen": key.removesuffix(BESIDE_TORCH).removesuffix(SMALL_PAGES) == chosen}
        for key, values in rates.items()
    ]


def run_case(
    name: str, storage: str, quick: bool, threads: int, with_torch: bool
) -> list[dict[str, Any]]:
    """All rows of one case, without or with torch."""
    case = CASES[name]
    clock = 1 if threads == 1 else 0
    megabytes, layers = (132, 6) if threads == 1 else (512, 5)
    if quick:
        megabytes, layers = megabytes // 2, 4
    setup = Setup(case, storage, megabytes << 20, layers)
    best = best_isa(case, storage)
    runs = {
        "streaming_read": setup.read(clock),
        "streaming_read 4 KiB ahead": setup.read(clock, 4096),
    }
    if with_torch:
        runs |= {f"wscope/{best}": setup.kernel(best, clock)}
        import torch

        torch.set_num_threads(threads)
        entries = setup.blocks * BLOCK
        runs |= peers.torch_peers(case, ROWS, entries, clock)
        runs |= peers.vllm_peers(case, ROWS, entries, clock)
    else:
        isas = [isa for isa in own_isas(case, storage) if isa != "portable"] or ["portable"]
        runs |= {f"wscope/{isa}": setup.kernel(isa, clock) for isa in isas}
        runs[f"wscope/{best} no prefetch"] = setup.kernel(best, clock, 0)
        runs[f"wscope/{best} packed when read"] = setup.rows(best, clock)
        if storage == "bfloat16":
            runs |= peers.jax_peer(case, ROWS, setup.blocks * BLOCK, clock, BLOCK)
    label = name if storage == "bfloat16" else f"{name}_f32"
    rates = sample(runs, setup.bytes, 5 if quick else 15)
    if with_torch:  # a second ceiling and a second reading of our own kernel
        rates = {
            key if key.startswith(PEERS) else f"{key}{BESIDE_TORCH}": values
            for key, values in rates.items()
        }
    rows = rows_of(label, rates, threads, f"wscope/{best}")
    if with_torch and name == "gqa8_d128" and clock == 0:
        import torch

        if torch.cuda.is_available():
            rows += with_link(setup, label, best, quick)
    setup.pool.close()
    return rows


def small_pages(names: list[str], quick: bool, threads: int) -> list[dict[str, Any]]:
    """The chosen kernel on 4 KiB pages; to be called last: the process has no huge pages afterwards."""
    if ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        return []
    rows = []
    for name in names[:1] if quick else names:
        megabytes, layers = (132, 6) if threads == 1 else (512, 3)
        clock = 1 if threads == 1 else 0
        setup = Setup(CASES[name], "bfloat16", megabytes << 20, layers)
        best = best_isa(CASES[name], "bfloat16")
        runs = {
            f"streaming_read{SMALL_PAGES}": setup.read(clock),
            f"wscope/{best}{SMALL_PAGES}": setup.kernel(best, clock),
        }
        rows += rows_of(name, sample(runs, setup.bytes, 7), threads, f"wscope/{best}")
        setup.pool.close()
    return rows


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument(
        "--cases",
        type=options.some_of(CASE_NAMES),
        default=",".join(CASE_NAMES),
        help="a list of shapes",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads",
        type=options.count,
        default=cores - 1 if cores > 4 else 1,
        help="workers (default: all cores but one, or one where there are few)",
    )
    parser.add_argument(
        "--without-torch", action="store_true", help="leave out torch and the peers that need it"
    )
    return options.parse(parser, cases=",".join(PEER_CASES))


def main() -> None:
    args = arguments()
    threads, known = args.threads, [name for name in args.cases if name in PEER_CASES]
    _ffi.start_workers(threads)
    print(f"{threads} worker(s), instruction sets: {', '.join(_ffi.isas())}")
    faulthandler.enable()  # after the module has asked for AMX: its signal stack is small
    has_torch = not args.without_torch and importlib.util.find_spec("torch") is not None
    with record.kept(args.json) as rows:
        for name in args.cases:
            rows += run_case(name, "bfloat16", args.quick, threads, with_torch=False)
        if not args.quick and "gqa8_d128" in args.cases:
            rows += run_case("gqa8_d128", "float32", args.quick, threads, with_torch=False)
        if has_torch:
            for name in known:
                rows += run_case(name, "bfloat16", args.quick, threads, with_torch=True)
        rows += small_pages(known, args.quick, threads)


if __name__ == "__main__":
    options.end_in_one_line(main)
