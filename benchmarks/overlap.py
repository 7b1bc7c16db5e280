"""Do the CPU's part and the device's part of attention run at the same time?

One layer, one row, on a machine without a GPU: the UNPINNED part on one worker with a core of its own, the PINNED part
streamed and attended by XLA held to another core. Both parts are made equally long first; then steps with the one part,
the other and both are interleaved. The ceiling of a step with both is the longer of the two.
"""

import os

os.environ.setdefault("NPROC", "1")  # XLA's own pool; read when its backend starts
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools
import re
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import options
import record

from tests.cases import CASES
from wscope_jax import Entries, InplaceKVCache, Stream, attend, policies
from wscope_jax.attention import store_blocks
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.views import Views

CASE = "gqa8_d128"
BLOCK = 256


def hold_to_cores() -> None:
    """Puts the worker on the last core and everything else on the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("overlap: needs two cores")
    num_workers = 0
    for task in Path("/proc/self/task").iterdir():
        is_worker = re.fullmatch(r"wscope-w\d+", (task / "comm").read_text().strip()) is not None
        os.sched_setaffinity(int(task.name), {cores[-1]} if is_worker else set(cores[:-1]))
        num_workers += is_worker
    assert num_workers == 1


@functools.partial(jax.jit, donate_argnums=0)
def _step(views: Views, q: jax.Array, new: Entries) -> tuple[Views, jax.Array]:
    views = views.begin()
    o, view = attend(q, new, views[0], scale=CASES[CASE].scale)
    return views.put(0, view).advance(), o


@functools.partial(jax.jit, donate_argnums=0)
def _write(views: Views, prompt: Entries) -> tuple[Views, None]:
    return views.put(0, store_blocks(prompt, views[0].begin())), None


class Setup:
    """A cache whose placed blocks are `host` UNPINNED and `link` PINNED ones."""

    def __init__(self, host: int, link: int) -> None:
        layout, heads = CASES[CASE].layout, CASES[CASE].num_q_heads
        draw = np.random.default_rng(0)
        tokens = (host + link) * BLOCK

        def normal(*shape: int) -> jax.Array:
            return jnp.array(draw.standard_normal(shape, np.float32), jnp.bfloat16)

        self.q = normal(1, heads, layout.key_dim)
        self.new = Entries(normal(1, layout.num_kv_heads, 128), normal(1, layout.num_kv_heads, 128))
        self.cache = InplaceKVCache(
            [[Stream(layout)]],
            policy=policies.WriteScope(share=host / (host + link)),
            batch=1,
            max_len=2 * tokens,  # near its end a region takes what the other has left
            window=BLOCK,
            dtype="bfloat16",
            chunk_entries=max(BLOCK, link * BLOCK),
        )
        prompt = Entries(*(normal(tokens, layout.num_kv_heads, 128) for _ in range(2)))
        self.cache.begin_prompt(0, tokens)
        self.cache.write_prompt(0, [0], lambda views: _write(views, prompt))
        self.cache.end_prompt(0)
        placed = [self.cache.placement.num_blocks(0, r) for r in HOST_REGIONS]
        assert placed == [host, link], placed

    def seconds(self) -> float:
        """Wall time of one step, from dispatch to result."""
        began = time.perf_counter()
        self.cache.step(lambda views: _step(views, self.q, self.new)).block_until_ready()
        return time.perf_counter() - began


def median(setup: Setup, runs: int) -> float:
    for _ in range(3):
        setup.seconds()
    return statistics.median(setup.seconds() for _ in range(runs))


def balance(link: int) -> int:
    """UNPINNED blocks that take as long as `link` PINNED ones."""
    host, wanted = link, median(Setup(0, link), 15)
    for _ in range(3):
        host = max(1, round(host * wanted / median(Setup(host, 0), 15)))
    return host


def main() -> None:
    args = options.parser(__doc__).parse_args()
    from wscope_jax import _ffi

    _ffi.start_workers(1)
    hold_to_cores()
    link = 24 if args.quick else 48
    host = balance(link)
    setups = {"host only": Setup(host, 0), "link only": Setup(0, link), "both": Setup(host, link)}
    samples: dict[str, list[float]] = {name: [] for name in setups}
    for number in range(3 + (30 if args.quick else 100)):
        for name, setup in setups.items():
            seconds = setup.seconds()
            if number >= 3:
                samples[name].append(1e3 * seconds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    longer = max(medians["host only"], medians["link only"])
    rows = [
        record.row(CASE, f"wscope/{name}", values, "ms", longer) for name, values in samples.items()
    ]
    record.finish(rows, args.json)
    both, total = medians["both"], medians["host only"] + medians["link only"]
    print(f"step with both parts / sum of the parts = {both / total:.3f} (0.5 = complete overlap)")
    for setup in setups.values():
        setup.cache.close()


if __name__ == "__main__":
    options.end_in_one_line(main)
