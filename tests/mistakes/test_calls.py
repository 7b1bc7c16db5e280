"""The cache in code that does not keep its rules: calls that are missing, rows, layers and arguments that are wrong."""

import dataclasses
import gc
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_cache import BLOCK, LAYOUT, Texts
from wscope_jax import Entries, InplaceKVCache, Stream, attend, evictions, plan, policies
from wscope_jax.dispatcher import Dispatcher
from wscope_jax.errors import CapacityError, UsageError, WscopeError
from wscope_jax.layout import Region
from wscope_jax.placement import Occupancy
from wscope_jax.views import Views

ROOT = Path(__file__).parents[2]
POLICIES = {"share_0.5": policies.WriteScope(share=0.5), "resident": policies.Resident()}
NOT_MADE = "a program did not make the calls of its plan"


@pytest.fixture(params=sorted(POLICIES))
def texts(request: pytest.FixtureRequest) -> Iterator[Texts]:
    """Two layers and three rows; row 0 decodes."""
    made = Texts(3, 320, num_layers=2, policy=POLICIES[request.param])
    made.cache.begin_prompt(0, 70)
    made.write(0, 70, (0, 1))
    made.cache.end_prompt(0)
    yield made
    made.cache.close()


@pytest.fixture
def placing() -> Iterator[Texts]:
    """As `texts`, with plans."""
    made = Texts(3, 320, num_layers=2, policy=POLICIES["share_0.5"])
    made.cache.begin_prompt(0, 70)
    made.write(0, 70, (0, 1))
    made.cache.end_prompt(0)
    yield made
    made.cache.close()


# --- calls that are not made ----------------------------------------------------------------------


def test_a_prompt_without_its_calls(placing: Texts) -> None:
    placing.cache.begin_prompt(1, 70)
    with pytest.raises(WscopeError, match=NOT_MADE):
        placing.cache.write_prompt(1, (0, 1), lambda views: (views, 1))
    for use in (lambda: placing.cache.end_prompt(1), placing.step, placing.cache.prepare_step):
        with pytest.raises(WscopeError, match=NOT_MADE):
            use()


def slowly(order: jax.Array) -> jax.Array:
    """The order, after some 0.3 s of work; a program with a callback would be run by its dispatch."""
    x = jax.lax.fori_loop(
        0, 40, lambda _, x: jnp.sin(x @ x), jnp.full((700, 700), order.astype(jnp.float32))
    )
    return order + (x[0, 0] > 2).astype(jnp.int32)


@pytest.mark.parametrize("written", [(0,), (0, 1)])
def test_a_slow_prompt_without_its_calls(placing: Texts, written: tuple[int, ...]) -> None:
    """Its arrays are not ready when it is dispatched: what waits for its blocks finds out."""

    @jax.jit
    def slow(views: Views) -> tuple[Views, None]:
        shared = views.begin().shared
        shared = shared._replace(order=slowly(shared.order))
        return dataclasses.replace(views, shared=shared), None

    def rest() -> None:
        if len(written) == 1:  # its program finds the plan before it
            placing.write(1, 70, (1,))
        placing.cache.end_prompt(1)

    placing.cache.begin_prompt(1, 70)
    placing.cache.write_prompt(1, written, slow)
    with pytest.raises(WscopeError, match=f"{NOT_MADE}|the plan before is not used up"):
        rest()


def test_a_step_without_its_calls(placing: Texts) -> None:
    with pytest.raises(WscopeError, match=NOT_MADE):
        placing.cache.step(lambda views: (views, None))
    with pytest.raises(WscopeError, match=NOT_MADE):
        placing.step()


def test_a_step_that_makes_some_of_its_calls(placing: Texts) -> None:
    """Known when it has run: at once, or when the next step comes."""

    def steps() -> None:
        only_begin = jax.jit(lambda views: (views.begin(), jnp.float32(1)))
        jax.block_until_ready(placing.cache.step(only_begin))
        placing.step()

    with pytest.raises(WscopeError, match=NOT_MADE):
        steps()


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((), "advance: .* 0 calls of attend.* 2 layers"),
        ((0,), "advance: .* 1 calls of attend.* 2 layers"),
        ((0, 1, 1), "put: layer 1 comes after 2 layers"),
        ((0, 0), "put: layer 0 comes after 1 layers"),
        ((1, 0), "put: layer 1 comes after 0 layers"),
    ],
)
def test_a_step_of_other_layers(texts: Texts, layers: tuple[int, ...], said: str) -> None:
    """It is refused while it is traced, and leaves the cache as it was."""
    q, new = texts.q[:, 0], jax.tree.map(lambda x: x[:, 0], (texts.key, texts.value))

    @jax.jit
    def step(views: Views) -> tuple[Views, None]:
        views = views.begin()
        for i in layers:
            _, view = attend(q, Entries(*new), views[i], scale=1.0)
            views = views.put(i, view)
        return views.advance(), None

    with pytest.raises(UsageError, match=said):
        texts.cache.step(step)
    assert texts.error(0, texts.step()) < 1e-5


def test_a_program_that_does_not_start_leaves_the_cache_as_it_was(texts: Texts) -> None:
    cache = texts.cache
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            cache.step(lambda views: 1 / 0)  # type: ignore[arg-type, return-value]
    assert cache.length(0) == 70
    cache.begin_prompt(1, 70)
    with pytest.raises(ZeroDivisionError):
        cache.write_prompt(1, (0, 1), lambda views: 1 / 0)  # type: ignore[arg-type, return-value]
    texts.write(1, 70, (0, 1))
    cache.end_prompt(1)
    for _ in range(2 * BLOCK):
        o = texts.step()
    assert max(texts.error(row, o) for row in (0, 1)) < 1e-5
    assert cache.row_tokens(0)[Region.WINDOW] < 2 * BLOCK or not cache.spec.has_calls


def test_a_program_that_has_taken_the_views_and_fails_then(placing: Texts) -> None:
    def start_and_fail(views: Views) -> tuple[Views, None]:
        q, new = placing.q[:, 0], Entries(placing.key[:, 0], placing.value[:, 0])
        placing._step(views, q, new)
        raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late"):
        placing.cache.step(start_and_fail)
    with pytest.raises(
        WscopeError, match="not usable any more: a program failed to start: too late"
    ):
        placing.step()


@pytest.mark.parametrize("kind", [jnp.int32, np.int64])
def test_numbers_of_rows_may_be_of_any_type(texts: Texts, kind: Any) -> None:
    cache, row = texts.cache, kind(1)
    cache.begin_prompt(row, kind(70))
    padded = texts.q[1, :96], Entries(texts.key[1, :96], texts.value[1, :96])
    args = (*padded, jnp.int32(1), jnp.int32(70))
    cache.write_prompt(row, (0, 1), lambda views: texts._prefill(views, *args, (0, 1)))
    cache.end_prompt(row)
    assert texts.error(1, texts.step()) < 1e-5
    assert cache.holds(row)
    assert cache.length(row) == 71
    cache.release(row)
    assert not cache.holds(1)


def slow_step(
    placing: Texts, advance: bool, times: int = 4
) -> Callable[[Views], tuple[Views, None]]:
    """A step whose first call comes late, after a second or more with 4 `times`."""
    q, key, value = placing.q[:, 0], placing.key[:, 0], placing.value[:, 0]

    def step(views: Views) -> tuple[Views, None]:
        order = views.shared.order
        for _ in range(times):
            order = slowly(order)
        views = dataclasses.replace(views, shared=views.shared._replace(order=order)).begin()
        for i in range(2):
            views = views.put(i, attend(q, Entries(key, value), views[i], scale=1.0)[1])
        return views.advance() if advance else views, None

    return jax.jit(step, donate_argnums=0)


def number_of_another() -> int:
    """Of a cache that is made now; it makes steps, whatever else still runs."""
    other = Texts(1, 320, policy=POLICIES["share_0.5"])
    other.cache.begin_prompt(0, 70)
    other.write(0, 70)
    other.cache.end_prompt(0)
    for _ in range(3):
        assert other.error(0, other.step()) < 1e-4
    other.cache.close()
    return other.cache.spec.engine


def test_a_step_that_does_not_advance(placing: Texts) -> None:
    """Its calls are made all the same, and waited for."""
    number = placing.cache.spec.engine
    with pytest.raises(UsageError, match=r"a step views\.advance"):
        placing.cache.step(slow_step(placing, advance=False))
    placing.cache.close()
    assert number_of_another() == number


def interrupted(texts: Texts) -> None:
    """A step is dispatched, and its arrays are lost to an interruption."""
    step = slow_step(texts, advance=True, times=16)  # longer than a collection of garbage takes

    def lose(views: Views) -> tuple[Views, None]:
        step(views)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        texts.cache.step(lose)


@pytest.mark.parametrize("end", ["closed", "collected"])
@pytest.mark.usefixtures("placing")  # has the lowest number, which other tests need
def test_nobody_gets_the_number_of_a_step_that_may_still_run(end: str) -> None:
    lost = Texts(3, 320, num_layers=2, policy=POLICIES["share_0.5"])
    lost.cache.begin_prompt(0, 70)
    lost.write(0, 70, (0, 1))
    lost.cache.end_prompt(0)
    number = lost.cache.spec.engine
    interrupted(lost)
    if end == "closed":
        lost.cache.close()
    del lost
    gc.collect()
    assert number_of_another() != number


def test_an_eviction_that_is_interrupted_may_still_run(
    placing: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken the order, and nobody has the one that it gives."""

    def lose(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def decode() -> None:
        for _ in range(2 * BLOCK):
            placing.step()

    monkeypatch.setattr(evictions, "dataclasses", types.SimpleNamespace(replace=lose))
    with pytest.raises(KeyboardInterrupt):
        decode()
    # Behind its calls, or its queue keeps the lowest number, which other tests need.
    while not placing.cache._dispatcher._queue.idle:
        time.sleep(0.001)
    close, told = Dispatcher.close, []

    def tell(dispatcher: Dispatcher, *, over: bool = True) -> None:
        told.append(over)
        close(dispatcher, over=over)

    monkeypatch.setattr(Dispatcher, "close", tell)
    placing.cache.close()
    assert told == [False]


def test_a_number_is_free_where_a_step_was_not_dispatched(placing: Texts) -> None:
    def lose(views: Views) -> tuple[Views, None]:
        raise KeyboardInterrupt

    number = placing.cache.spec.engine
    with pytest.raises(KeyboardInterrupt):
        placing.cache.step(lose)
    placing.cache.close()
    assert number_of_another() == number


def test_a_program_that_returns_no_views(texts: Texts) -> None:
    with pytest.raises(UsageError, match=r"return \(views, out\)"):
        texts.cache.step(lambda views: (None, views))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("end", ["texts.step()", "texts.step(); cache.close()", "pass"])
def test_a_failure_is_told_once(end: str) -> None:
    """Without a call that could tell it, one line at exit does; JAX prints no tracebacks."""
    program = f"""
        import dataclasses, time
        import jax
        from tests.mistakes.test_calls import slowly
        from tests.test_cache import Texts, policies
        from wscope_jax.errors import WscopeError
        texts = Texts(1, 320, policy=policies.WriteScope(share=0.5))
        cache = texts.cache
        cache.begin_prompt(0, 70)
        texts.write(0, 70)
        cache.end_prompt(0)

        @jax.jit
        def twice(views):
            views = views.begin()
            shared = views.shared._replace(order=slowly(views.shared.order))
            return dataclasses.replace(views, shared=shared).begin(), None

        cache.step(twice)
        while cache._dispatcher.failure is None:
            time.sleep(0.01)
        try:
            {end}
        except WscopeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert (done.returncode, len(lines)) == (0, 1), done
    assert "step_begin: the plan before is not used up" in lines[0]


# --- rows and layers ------------------------------------------------------------------------------


def test_a_prompt_that_is_not_whole(texts: Texts) -> None:
    cache = texts.cache
    cache.begin_prompt(1, 70)
    with pytest.raises(UsageError, match=r"row 1 is not written in layers 0, 1 of 2"):
        cache.end_prompt(1)
    texts.write(1, 70, (1,))
    with pytest.raises(UsageError, match=r"row 1 is not written in layers 0 of 2"):
        cache.end_prompt(1)
    assert cache.active_rows == [0]
    for layers, about in (
        ((1,), "layer 1 of row 1 is written already"),
        ((0, 0), "layer 0 of row 1 is written already"),
        ((2,), "from 0 to 1, got 2"),
        ((-1,), "from 0 to 1, got -1"),
        (("0",), "from 0 to 1, got '0'"),
        (0, "list of layers, got 0"),
    ):
        with pytest.raises(UsageError, match=f"layers: .*{about}"):
            cache.write_prompt(1, layers, lambda views: (views, None))  # type: ignore[arg-type]
    texts.write(1, 70, (0,))
    cache.end_prompt(1)
    assert max(texts.error(row, texts.step()) for row in (0, 1)) < 1e-5


def test_a_row_without_a_prompt(texts: Texts) -> None:
    cache = texts.cache
    for row in (0, 1):  # one that decodes, one that is empty
        for use in (
            lambda row=row: cache.end_prompt(row),
            lambda row=row: cache.write_prompt(row, (0,), lambda views: (views, None)),
        ):
            with pytest.raises(UsageError, match=f"row {row} has no prompt under way"):
                use()
    cache.begin_prompt(1, 70)
    cache.release(1)
    with pytest.raises(UsageError, match="row 1 has no prompt under way"):
        cache.end_prompt(1)
    with pytest.raises(UsageError, match="row 1 holds no sequence"):
        cache.release(1)
    with pytest.raises(UsageError, match="row 0 still holds a sequence"):
        cache.begin_prompt(0, 5)


class Broken(policies.CpuOnly):
    """Routes one block and then fails, or has no room."""

    def route(self, occupancy: Occupancy) -> Region | None:
        if occupancy.row_blocks == 0:
            return Region.UNPINNED
        return None if occupancy.batch_blocks > 1 else self.fail()

    def fail(self) -> Region:
        raise KeyError("mine")


def test_a_prompt_that_fails_leaves_the_row_empty() -> None:
    cache = Texts(2, 320, policy=Broken()).cache
    for length, error in ((0, UsageError), (321, UsageError), ("3", UsageError), (70, KeyError)):
        with pytest.raises(error):
            cache.begin_prompt(0, length)  # type: ignore[arg-type]
        assert not cache.holds(0)
        for use in (
            lambda: cache.end_prompt(0),
            lambda: cache.write_prompt(0, (0,), lambda views: (views, None)),
            lambda: cache.release(0),
        ):
            with pytest.raises(UsageError, match="row 0"):
                use()
        assert sum(cache.row_tokens(0).values()) == 0
    cache.close()


@pytest.mark.parametrize("row", [3, -1, 1.0, "0", None, True])
def test_rows_that_are_none(texts: Texts, row: Any) -> None:
    cache = texts.cache
    uses: list[Callable[[Any], object]] = [
        lambda row: cache.begin_prompt(row, 5),
        lambda row: cache.write_prompt(row, (0,), lambda views: (views, None)),
        cache.end_prompt,
        cache.release,
        cache.holds,
        cache.length,
        cache.row_tokens,
        cache.is_full,
        lambda row: cache.placement.region_of(row, 0),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="row: expected an integer from 0 to 2"):
            use(row)


def test_a_step_of_no_row(texts: Texts) -> None:
    texts.cache.release(0)
    with pytest.raises(UsageError, match="step: no row decodes"):
        texts.step()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_row_holds_max_len_tokens(policy: policies.Policy) -> None:
    texts = Texts(1, 96, policy=policy)
    cache = texts.cache
    cache.begin_prompt(0, 70)
    texts.write(0, 70)
    cache.end_prompt(0)
    steps = 0
    while not cache.is_full(0):
        texts.step()
        steps += 1
    assert (steps, cache.length(0)) == (26, 96)
    for use in (cache.prepare_step, lambda: cache.step(lambda views: (views, None))):
        with pytest.raises(CapacityError, match="max_len: row 0 holds 96 tokens"):
            use()
    cache.release(0)
    cache.begin_prompt(0, 96)
    cache.close()


# --- arguments ------------------------------------------------------------------------------------


class Half:
    name = "half"
    uses_host = uses_link = True


@pytest.mark.parametrize(
    ("policy", "about"),
    [
        (policies.CpuOnly, r"policies\.CpuOnly\(\), got the class CpuOnly"),
        (None, "got None"),
        ("cpu_only", "got 'cpu_only'"),
        (Half(), "lacks exact, schedule, cpu_share, route, observe"),
    ],
)
def test_policies_that_are_none(policy: Any, about: str) -> None:
    streams = [[Stream(LAYOUT)]]
    for use in (InplaceKVCache, plan):
        with pytest.raises(UsageError, match=f"policy: expected .*{about}"):
            use(streams, policy=policy, batch=1, max_len=100)  # type: ignore[operator]


@pytest.mark.parametrize("streams", [[], [Stream(LAYOUT)], [[]], None, 3, "ab", [[LAYOUT]]])
def test_streams_that_are_none(streams: Any) -> None:
    for use in (InplaceKVCache, plan):
        with pytest.raises(UsageError, match=r"streams: expected .*\[\[Stream\(layout\)\]\]"):
            use(streams, policy=policies.CpuOnly(), batch=1, max_len=100)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("batch", value) for value in (0, -1, 1.5, "1", None)],
        *[("max_len", value) for value in (0, "9", None)],
        *[("window", value) for value in (31, "32", 32.0, None)],
        *[("dtype", value) for value in ("int8", None)],
    ],
)
def test_sizes_that_are_none(name: str, value: Any) -> None:
    values = {"batch": 1, "max_len": 9, "window": BLOCK, name: value}
    with pytest.raises(UsageError, match=f"{name}: "):
        InplaceKVCache([[Stream(LAYOUT)]], policy=policies.CpuOnly(), **values)


@pytest.mark.parametrize("policy", [policies.CpuOnly(), policies.Resident()])
def test_a_batch_that_no_machine_has_room_for(policy: policies.Policy) -> None:
    """Before anything is made for each of its rows."""
    with pytest.raises(CapacityError, match="use fewer or shorter sequences"):
        InplaceKVCache([[Stream(LAYOUT)]], policy=policy, batch=2**30, max_len=420, window=BLOCK)


@pytest.mark.parametrize("share", ["x", -0.1, 1.1, float("nan"), True, [0.5]])
def test_shares_that_are_none(share: Any) -> None:
    with pytest.raises(UsageError, match="share: expected a number 0 to 1"):
        policies.WriteScope(share=share)
    with pytest.raises(UsageError, match="cpu_share: expected a number 0 to 1"):
        policies.choose("write_scope", share)
    assert policies.WriteScope(share=np.float32(0.5)).share == 0.5  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="roofline: expected"):
        policies.WriteScope(roofline="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [0, "16", 1.5, None])
def test_layouts_that_are_none(dim: Any) -> None:
    with pytest.raises(UsageError, match="key_dim: expected an integer of at least 1"):
        type(LAYOUT)(num_kv_heads=2, key_dim=dim, value_dim=16)
    with pytest.raises(UsageError, match="layout: expected an EntryLayout"):
        Stream(dim)
