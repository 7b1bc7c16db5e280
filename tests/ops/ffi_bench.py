"""What the tests of the custom calls share: a pool, a step queue, and attention by numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from wscope_jax import _ffi
from wscope_jax.layout import ByteOrder, EntryLayout, unpack
from wscope_jax.ops import host
from wscope_jax.partial import Partial, empty_partial

BLOCK = 32
SCALE = 0.3
GQA = EntryLayout(num_kv_heads=2, key_dim=20, value_dim=24)
MLA = EntryLayout(num_kv_heads=1, key_dim=24, value_dim=16, value_in_key=True)
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

Step = Callable[..., Any]
Table = Sequence[tuple[int, ...]]


def _rows(rows: Table, width: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(rows, np.int32).reshape(len(rows), width)


class Bench:
    """A pool with random blocks and a step queue, as an engine would have them."""

    def __init__(self, layout: EntryLayout, storage: str, layers: int = 2, slots: int = 6) -> None:
        _ffi.start_workers(2)
        self.layout, self.storage = layout, storage
        self.dtype = DTYPES[storage]
        block_numbers = layout.num_kv_heads * BLOCK * layout.stored_dim
        self.pool = _ffi.Pool(layers, slots + 2, block_numbers * np.dtype(self.dtype).itemsize)
        self.pool.commit(slots)
        self.queue = _ffi.StepQueue()
        rng = np.random.default_rng(5)
        for layer in range(layers):
            for slot in range(slots):
                self.block(layer, slot)[:] = rng.standard_normal(block_numbers).astype(self.dtype)

    def block(self, layer: int, slot: int) -> np.ndarray[Any, Any]:
        return self.pool.view(layer, slot).view(self.dtype)

    def push(
        self,
        jobs: Table = (),
        tables: Sequence[Sequence[int]] = (),
        loads: Table = (),
        stores: Table = (),
        moves: Table = (),
    ) -> None:
        pool = self.pool.id
        self.queue.push(
            jobs=_rows(jobs, 3),
            host_pool=pool,
            table_ptr=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            table=np.asarray([slot for table in tables for slot in table], np.int32),
            load_pool=pool,
            loads=_rows(loads, 3),
            stores=_rows(stores, 2),
            moves=_rows([(block, pool, slot) for block, slot in moves], 3),
        )

    def begin(self, order: jax.Array) -> jax.Array:
        return host.step_begin(order, engine=self.queue.id)

    def start(self, q: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host.host_start(
            q,
            order,
            layout=self.layout,
            block=BLOCK,
            scale=SCALE,
            storage=self.storage,
            engine=self.queue.id,
        )

    def finish(self, q: jax.Array, order: jax.Array) -> tuple[Partial, jax.Array]:
        part = empty_partial(q.shape[0], q.shape[1], self.layout.value_dim)
        _, _, partial, order = host.host_finish(part, part, order, engine=self.queue.id)
        return partial, order

    def attend(self, q: jax.Array, order: jax.Array) -> tuple[Partial, jax.Array]:
        q, order = self.start(q, self.begin(order))
        return self.finish(q, order)

    def reference(
        self, layer: int, q: np.ndarray[Any, Any], slots: list[int]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(o [H, V], lse [H]) of one row in float64."""
        if not slots:
            return np.zeros((q.shape[0], self.layout.value_dim)), np.full(q.shape[0], -np.inf)
        layout = self.layout
        blocks = jnp.stack(
            [self.block(layer, s).reshape(layout.num_kv_heads, -1) for s in slots], axis=0
        )
        k_GSK, v_GSV = (
            np.asarray(x, np.float64).swapaxes(0, 1).reshape(layout.num_kv_heads, -1, x.shape[-1])
            for x in unpack(blocks, layout, BLOCK, ByteOrder.TILES)
        )
        group = q.shape[0] // layout.num_kv_heads
        k_HSK, v_HSV = (np.repeat(x, group, axis=0) for x in (k_GSK, v_GSV))
        scores_HS = np.einsum("hk,hsk->hs", q.astype(np.float64), k_HSK) * np.float64(SCALE)
        top_H1 = scores_HS.max(axis=1, keepdims=True)
        weights_HS = np.exp(scores_HS - top_H1)
        total_H1 = weights_HS.sum(axis=1, keepdims=True)
        o_HV = np.einsum("hs,hsv->hv", weights_HS / total_H1, v_HSV)
        return o_HV, (top_H1 + np.log(total_H1))[:, 0]


def zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def fails(step: Step, *args: Any, match: str) -> None:
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=match):
        jax.block_until_ready(step(*args))
