"""Caches filled with random entries through the real `store`, and steps that only attend: for several benchmarks."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import jax
import jax.numpy as jnp

from tests.cases import Case
from wscope_jax import COMPILER_OPTIONS, Entries, InplaceKVCache, Stream, attend
from wscope_jax.attention import store_blocks
from wscope_jax.footprint import CHUNK_ENTRIES
from wscope_jax.layout import Region
from wscope_jax.ops.window import fill as fill_window
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.policies import Policy
from wscope_jax.roofline import StepTiming
from wscope_jax.views import View, Views

TELL_S: Final = 10.0
PHASES: Final = ("cpu_ns", "link_ns", "link_idle_ns", "wait_cpu_ns", "wait_link_ns")


@functools.partial(jax.jit, donate_argnums=0)
def _write(view: View, entries: Entries, row: jax.Array, length: jax.Array) -> View:
    view = store_blocks(entries, view.begin())
    rings = fill_window(view.rings[0], entries, row, view.spec.window_start(length), length)
    return dataclasses.replace(view, rings=(rings,))


def _write_layer(
    layer: int, entries: Entries, row: jax.Array, length: jax.Array, views: Views
) -> tuple[Views, None]:
    return views.put(layer, _write(views[layer], entries, row, length)), None


def fill(cache: InplaceKVCache, tokens: int) -> None:
    """Random entries in all rows; see `filling`."""
    for _ in filling(cache, tokens):
        pass


def filling(cache: InplaceKVCache, tokens: int) -> Iterator[int]:
    """Random entries, the same in every row and layer: what lies in them costs the same time; yields each filled row.

    What is on the device at a time is a row's entries of one layer, and what `store` keeps under way of them. Long ones
    tell how far they are.
    """
    layout, dtype = cache.layout, jnp.dtype(cache.spec.storage)
    padded = -(-tokens // cache.block) * cache.block
    keys = jax.random.split(jax.random.key(0))

    def normal(number: int, dim: int) -> jax.Array:
        return jax.random.normal(keys[number], (padded, layout.num_kv_heads, dim), dtype)

    value = None if layout.value_in_key else normal(1, layout.value_dim)
    entries = Entries(normal(0, layout.key_dim), value)
    told = time.perf_counter()
    for row in range(cache.batch):
        cache.begin_prompt(row, tokens)
        for layer in range(cache.num_layers):
            write = functools.partial(
                _write_layer, layer, entries, jnp.int32(row), jnp.int32(tokens)
            )
            cache.write_prompt(row, (layer,), write)
        cache.end_prompt(row)
        if time.perf_counter() - told > TELL_S:
            told = time.perf_counter()
            print(f"  filled {row + 1} rows of {cache.batch}", flush=True)
        yield row


def placed_bytes(cache: InplaceKVCache) -> dict[Region, int]:
    """Bytes of the blocks of all rows and layers by host region."""
    block = cache.num_layers * cache.block * cache.entry_bytes
    rows = range(cache.batch)
    return {r: block * sum(cache.placement.num_blocks(b, r) for b in rows) for r in HOST_REGIONS}


def phases(timings: Sequence[StepTiming]) -> dict[str, float]:
    """Median milliseconds of what a step's two sides took and waited."""
    middle = len(timings) // 2
    return {
        field[:-3]: 1e-6 * sorted(getattr(t, field) for t in timings)[middle]
        for field in PHASES
        if timings
    }


@functools.partial(
    jax.jit, donate_argnums=0, static_argnames="scale", compiler_options=COMPILER_OPTIONS
)
def _attend_all(
    views: Views, q: jax.Array, new: Entries, *, scale: float
) -> tuple[Views, jax.Array]:
    views, o = views.begin(), jnp.zeros_like(q)
    for layer in range(len(views.layers)):
        o, view = attend(q + 0.01 * o, new, views[layer], scale=scale)
        o = jnp.pad(o, ((0, 0), (0, 0), (0, q.shape[-1] - o.shape[-1])))
        views = views.put(layer, view)
    return dataclasses.replace(views, turn=0, attended=0), o


class Setup:
    """A filled cache, and a step of `attend` in every layer that may be repeated: it does not make the cache grow.

    It is filled and ready within a `with` block.

    Args:
        case: shape of the attention.
        tokens: of each row.
        policy: of the cache; updated by what its steps take.
    """

    def __init__(
        self,
        case: Case,
        *,
        layers: int,
        batch: int,
        tokens: int,
        policy: Policy,
        window: int = 256,
        chunk_entries: int = CHUNK_ENTRIES,
    ) -> None:
        self.cache = InplaceKVCache(
            [[Stream(case.layout)]] * layers,
            policy=policy,
            batch=batch,
            max_len=tokens + window,
            window=window,
            dtype="bfloat16",
            chunk_entries=chunk_entries,
        )
        self._filling = filling(self.cache, tokens)
        self.filled_s = 0.0
        self.timings: list[StepTiming] = []
        layout, key = case.layout, jax.random.key(1)
        q = jax.random.normal(key, (batch, case.num_q_heads, layout.key_dim), jnp.bfloat16)
        new = q[:, : layout.num_kv_heads]
        value = None if layout.value_in_key else new[..., : layout.value_dim]
        self._step = functools.partial(
            _attend_all, q=q, new=Entries(new, value), scale=float(case.scale)
        )

    def fill_row(self) -> bool:
        """Fills the next row; false if there is none."""
        began = time.perf_counter()
        row = next(self._filling, None)
        self.filled_s += time.perf_counter() - began
        return row is not None

    def run(self, steps: int) -> float:
        """Seconds of a step when so many are dispatched one behind the other."""
        cache, out = self.cache, None
        began = time.perf_counter()
        for _ in range(steps):
            with cache._dispatcher.lock:
                cache.prepare_step()
                plan = cache._decode.plan if cache.spec.has_calls else None
                out = cache._regions.dispatch(plan, self._step)
        jax.block_until_ready(out)
        seconds = (time.perf_counter() - began) / steps
        for timing in cache._dispatcher.timings(cache._decode.num_jobs):
            self.timings.append(timing)
            cache.policy = cache.policy.observe(timing)
        return seconds

    def __enter__(self) -> "Setup":
        while self.fill_row():
            pass
        began = time.perf_counter()
        self.run(1)
        self.compiled_s = time.perf_counter() - began
        self.run(2)
        self.timings.clear()
        return self

    def __exit__(self, *_: Any) -> None:
        self.cache.close()


@contextmanager
def filled_together(setups: Sequence[Setup]) -> Iterator[None]:
    """Fills them row by row in turns, so that each gets its part of faster and of slower pages; closes them."""
    with ExitStack() as stack:
        for one in setups:
            stack.callback(one.cache.close)
        while any([one.fill_row() for one in setups]):
            pass
        for one in setups:
            stack.enter_context(one)
        yield
