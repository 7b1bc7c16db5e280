"""The manager: prompts written while other rows decode, moves under way, slow programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wscope_jax import Entries, EntryLayout, InplaceKVCache, Stream, attend, dispatcher, policies
from wscope_jax.attention import attend_prompt
from wscope_jax.footprint import Footprint, moves_under_way
from wscope_jax.layout import Region
from wscope_jax.ops.reference import attend_reference
from wscope_jax.views import Views

LAYOUT = EntryLayout(num_kv_heads=2, key_dim=16, value_dim=16)
HEADS, BLOCK, SCALE = 4, 32, 0.25


class Texts:
    """Random queries and entries of some rows, and a cache that reads them one after the other."""

    def __init__(self, num_rows: int, length: int, num_layers: int = 1, **options: Any) -> None:
        keys = jax.random.split(jax.random.key(3), 3)
        shape = (num_rows, length, LAYOUT.num_kv_heads, LAYOUT.key_dim)
        self.q = jax.random.normal(keys[0], (num_rows, length, HEADS, LAYOUT.key_dim))
        self.key = jax.random.normal(keys[1], shape)
        self.value = jax.random.normal(keys[2], shape)
        self.cache = InplaceKVCache(
            [[Stream(LAYOUT)]] * num_layers,
            batch=num_rows,
            max_len=length,
            window=BLOCK,
            **options,
        )
        self._step = jax.jit(self._trace_step, donate_argnums=0)
        self._prefill = jax.jit(self._trace_prefill, donate_argnums=0, static_argnames="layers")

    @staticmethod
    def _trace_step(views: Views, q: jax.Array, new: Entries) -> tuple[Views, jax.Array]:
        views = views.begin()
        for i in range(len(views.layers)):
            o, view = attend(q, new, views[i], scale=SCALE)
            views = views.put(i, view)
        return views.advance(), o

    @staticmethod
    def _trace_prefill(
        views: Views,
        q: jax.Array,
        new: Entries,
        row: jax.Array,
        length: jax.Array,
        layers: tuple[int, ...],
    ) -> tuple[Views, None]:
        views = views.begin()
        for i in layers:
            _, view = attend_prompt(q, new, views[i], row=row, length=length, scale=SCALE)
            views = views.put(i, view)
        return views, None

    def write(self, row: int, length: int, layers: tuple[int, ...] = (0,)) -> None:
        padded = -(-length // BLOCK) * BLOCK
        q, entries = self.q[row, :padded], Entries(self.key[row, :padded], self.value[row, :padded])
        args = (q, entries, jnp.int32(row), jnp.int32(length))
        self.cache.write_prompt(row, layers, lambda views: self._prefill(views, *args, layers))

    def step(self) -> jax.Array:
        at = jnp.array([self.cache.length(row) for row in range(self.q.shape[0])])
        rows = jnp.arange(self.q.shape[0])
        new = Entries(self.key[rows, at], self.value[rows, at])
        o: jax.Array = self.cache.step(lambda views: self._step(views, self.q[rows, at], new))
        return o

    def error(self, row: int, o: jax.Array) -> float:
        """Distance of a step's output from attention over everything that the row has read."""
        length = self.cache.length(row)
        lengths = jnp.array([length], jnp.int32)
        one = slice(row, row + 1)
        whole = attend_reference(
            self.q[one, length - 1], self.key[one], self.value[one], lengths, scale=SCALE
        )
        return float(jnp.abs(o[row] - whole.o[0]).max())


@pytest.fixture
def texts() -> Any:
    made = Texts(2, 320, policy=policies.WriteScope(share=0.5))
    yield made
    made.cache.close()


def test_a_prompt_may_be_written_while_other_rows_decode(texts: Texts) -> None:
    texts.cache.begin_prompt(1, 70)
    texts.write(1, 70)
    texts.cache.end_prompt(1)
    assert texts.error(1, texts.step()) < 1e-5
    texts.cache.begin_prompt(0, 90)
    texts.write(0, 90)
    assert texts.error(1, texts.step()) < 1e-5
    texts.cache.end_prompt(0)
    for _ in range(100):
        o = texts.step()
        assert max(texts.error(0, o), texts.error(1, o)) < 1e-5
    assert texts.cache.row_tokens(0)[Region.WINDOW] < BLOCK + 48


def test_a_released_row_starts_anew(texts: Texts) -> None:
    for row in (0, 1):
        texts.cache.begin_prompt(row, 100)
        texts.write(row, 100)
        texts.cache.end_prompt(row)
    for _ in range(40):
        texts.step()
    texts.cache.release(0)
    for _ in range(5):
        assert texts.error(1, texts.step()) < 1e-5
    texts.cache.begin_prompt(0, 33)
    texts.write(0, 33)
    texts.cache.end_prompt(0)
    for _ in range(60):
        o = texts.step()
        assert max(texts.error(0, o), texts.error(1, o)) < 1e-5


def test_moves_under_way_are_bounded_and_planned_for() -> None:
    texts = Texts(24, 140, policy=policies.WriteScope(share=0.5))
    cache = texts.cache
    cache.set_fault(store_delay_ms=25)
    size = Footprint(
        streams=((Stream(LAYOUT),),),
        batch=24,
        max_len=140,
        window=BLOCK,
        itemsize=4,
        uses_host=True,
        uses_link=True,
    )
    for row in range(24):
        cache.begin_prompt(row, 20)
        texts.write(row, 20)
        cache.end_prompt(row)
    most = 0
    for _ in range(110):
        o = texts.step()
        most = max(most, cache._dispatcher._queue.staged_bytes)
    assert texts.error(5, o) < 1e-5
    assert moves_under_way(24) == 2
    assert 0 < most <= size.buffer_bytes()
    cache.close()


def test_a_slow_program_is_not_a_store_that_hangs(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "DEADLINE_S", 0.2)
    texts.cache.begin_prompt(0, 64)
    late = jax.pure_callback(
        lambda x: (__import__("time").sleep(0.8), x)[1],
        jax.ShapeDtypeStruct((), jnp.float32),
        jnp.float32(0),
    )
    q = texts.q + late  # the prefill has to wait for it
    texts.q = q
    texts.write(0, 64)
    texts.cache.end_prompt(0)


def test_a_store_that_hangs_is_named(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "DEADLINE_S", 0.2)
    texts.cache.set_fault(store_delay_ms=1500)
    texts.cache.begin_prompt(0, 64)
    texts.write(0, 64)
    with pytest.raises(Exception, match=r"no store ended within"):
        texts.cache.end_prompt(0)


def test_the_window_is_exact_at_every_length(texts: Texts) -> None:
    texts.cache.begin_prompt(0, 1)
    texts.write(0, 1)
    texts.cache.end_prompt(0)
    errors = [texts.error(0, texts.step()) for _ in range(2 * BLOCK + 60)]
    assert np.max(errors) < 1e-5


def test_padding_of_a_prompt_may_hold_anything(texts: Texts) -> None:
    """Padding gets no weight; 0 times what is not finite would count all the same."""
    length, padded = 40, 64
    beyond = jnp.arange(padded)[:, None, None] >= length
    q, key, value = (
        jnp.where(beyond, jnp.nan, x[0, :padded]) for x in (texts.q, texts.key, texts.value)
    )

    @jax.jit
    def prefill(views: Views) -> tuple[Views, jax.Array]:
        view, how = views[0].begin(), {"row": jnp.int32(0), "length": jnp.int32(length)}
        o, view = attend_prompt(q, Entries(key, value), view, scale=SCALE, **how)
        return views.put(0, view), o

    texts.cache.begin_prompt(0, length)
    o = texts.cache.write_prompt(0, (0,), prefill)
    texts.cache.end_prompt(0)
    for t in (0, 31, 32, 39):
        whole = attend_reference(
            texts.q[:1, t], texts.key[:1], texts.value[:1], jnp.array([t + 1]), scale=SCALE
        )
        assert float(jnp.abs(o[t] - whole.o[0]).max()) < 1e-5
    for _ in range(30):
        assert texts.error(0, texts.step()) < 1e-5
