"""How much of a GPU's memory a cache takes, counted in three ways that do not hide behind each other.

JAX's peak cannot be set back, and a step that is compiled may have needed more for its trial runs than it needs later.
So beside the difference of the peaks stands what is alive, and what the compiled steps need while they run; what the
extension has outside of JAX's pool, the driver tells.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
import record

from wscope_jax import COMPILER_OPTIONS, Engine, InplaceKVCache, devices, machine
from wscope_jax.footprint import Footprint
from wscope_jax.programs import Split, _sample
from wscope_jax.sampling import Rows

MB = 1e6


class Held(NamedTuple):
    """Bytes of the device's memory at one moment.

    Attributes:
        in_use: of JAX's pool, alive.
        peak: the most that was, since the process began.
        outside: of all that the driver has given out, what is not in JAX's pool.
    """

    in_use: int
    peak: int
    outside: int


def held() -> Held | None:
    """What is held now; None where JAX does not count (a CPU)."""
    device = devices.current()
    stats = device.memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        return None
    gpus = machine.gpus()
    number = int(device.local_hardware_id or 0)
    given = gpus[number].total - gpus[number].free if number < len(gpus) else 0
    # Without a figure of its own the pool is taken to be whole from the start, as it is unless told otherwise.
    pool = int(stats.get("pool_bytes") or stats.get("bytes_limit", 0))
    return Held(int(stats["bytes_in_use"]), int(stats["peak_bytes_in_use"]), given - pool)


def _step(leaves: Any, ids: jax.Array, rows: Rows, *, model: Split, value_dim: int) -> Any:
    """A decode step whose attention gives back its query."""
    module = model.join(leaves)
    x, positions, carry = module.embed(ids), jnp.zeros_like(ids), None
    for i in range(module.num_layers):
        new = module.project(i, x, positions, carry)
        carry = new.carry
        x = module.finish(i, x, new.q[..., :value_dim])
    return _sample(module.logits(x), rows, positions)


class Account:
    """What the caches of one engine add to its weights and to a step without a cache.

    Args:
        eng: the engine, its weights in place.
        rows: sampling of the rows that will decode.
        batch: number of them.
    """

    def __init__(self, eng: Engine, rows: Rows, batch: int) -> None:
        self._weights = eng._programs.weight_bytes
        self._drawn = held()
        self._alone_temp = self._run_alone(eng, rows, batch)
        self._before = held()

    @staticmethod
    def _run_alone(eng: Engine, rows: Rows, batch: int) -> int:
        model, layout = eng._programs._model, eng.model.streams[0][0].layout
        ids = jnp.zeros(batch, jnp.int32)

        def step(leaves: Any, ids: jax.Array, rows: Rows) -> Any:
            return _step(leaves, ids, rows, model=model, value_dim=layout.value_dim)

        began = time.perf_counter()
        program = (
            jax.jit(step, compiler_options=COMPILER_OPTIONS)
            .lower(model.leaves, ids, rows)
            .compile()
        )
        jax.block_until_ready(program(model.leaves, ids, rows))
        took_s, temp = time.perf_counter() - began, _temp_bytes(program)
        words = f"it needs {temp / MB:,.0f} MB beside its operands"
        print(f"  a step without a cache: compiled and run in {took_s:.1f} s; {words}", flush=True)
        return temp

    def alive(self, cache: InplaceKVCache, program: Any) -> int | None:
        """Bytes that a filled cache keeps alive and its compiled step adds while it runs, or None."""
        jax.block_until_ready(cache.views)
        now = held()
        if now is None or self._before is None:
            return None
        return now.in_use - self._before.in_use + _temp_bytes(program) - self._alone_temp

    def row(self, case: str, name: str, alive: int | None, size: Footprint) -> list[dict[str, Any]]:
        """Prints what a run took, to be called before its cache is closed; a row beside what was planned."""
        now, before, drawn = held(), self._before, self._drawn
        if now is None or before is None or drawn is None or alive is None:
            print("  GPU memory: not told by JAX on this device", flush=True)
            return []
        # Drawing weights may have needed more than a step does: then there is nothing to subtract.
        alone = before.peak - self._weights if before.peak > drawn.peak else 0
        by_peaks = now.peak - self._weights - alone
        outside = max(0, now.outside - before.outside)
        taken = max(by_peaks, alive) + outside
        planned = size.device_bytes + size.buffer_bytes()
        print(
            f"  GPU memory: peak {now.peak / MB:,.0f} MB - weights {self._weights / MB:,.0f} MB - a run with no cache "
            f"{alone / MB:,.0f} MB = {by_peaks / MB:,.0f} MB (peak after drawing weights {drawn.peak / MB:,.0f} MB)\n"
            f"    alive, and while a step runs: {alive / MB:,.0f} MB; outside of JAX's pool: {outside / MB:,.0f} MB\n"
            f"    so for KV, the larger of the two and what is outside: {taken / MB:,.0f} MB; planned "
            f"{planned / MB:,.0f} MB",
            flush=True,
        )
        return [record.row(case, f"wscope/{name} GPU memory", [taken / MB], "MB", planned / MB)]


def _temp_bytes(program: Any) -> int:
    """Bytes that a compiled program needs beside its operands while it runs."""
    needed = program.memory_analysis()
    return 0 if needed is None else int(needed.temp_size_in_bytes)


def print_host(when: str) -> None:
    """Prints what this process holds of the host's memory: a copy of the weights would show, and small pages would."""
    own, left = psutil.Process().memory_info().rss, machine.memory().room
    words = f"{own / 1e9:.1f} GB held, {_huge_bytes() / 1e9:.1f} of it in huge pages"
    print(f"host memory {when}: {words}, {left / 1e9:.1f} GB left", flush=True)


def _huge_bytes() -> int:
    """Bytes of this process in huge pages, as the system tells."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    return 0
