"""What the custom calls and plans refuse, with which text, and what a failure leaves behind."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ffi_bench import BLOCK, GQA, Bench, Step, fails, zero

from wscope_jax import _ffi
from wscope_jax.ops import host

Q = np.ones((2, 4, GQA.key_dim), np.float32)


@pytest.fixture
def plain() -> Iterator[Bench]:
    made = Bench(GQA, "float32")
    yield made
    made.queue.close()
    made.pool.close()


def test_a_program_without_a_plan_is_refused(plain: Bench) -> None:
    fails(jax.jit(plain.attend), Q, zero(), match="FAILED_PRECONDITION: step_begin: no plan")
    assert plain.queue.poison == "step_begin: no plan was pushed"


def test_a_plan_that_is_not_used_up_is_refused(plain: Bench) -> None:
    for _ in range(2):
        plain.push([(0, 0, 2)], [[0], [1]])
    begin = jax.jit(plain.begin)
    jax.block_until_ready(begin(zero()))
    fails(begin, zero(), match=r"not used up \(0 of 1 jobs started")


def test_a_call_too_many_is_refused(plain: Bench) -> None:
    plain.push([(0, 0, 2)], [[0], [1]])
    step = jax.jit(plain.attend)
    jax.block_until_ready(step(Q, zero()))
    fails(jax.jit(plain.start), Q, zero(), match="host_start: no plan is in use")


def test_a_finish_without_a_start_is_refused(plain: Bench) -> None:
    plain.push([(0, 0, 2)], [[0], [1]])
    step = jax.jit(lambda q, order: plain.finish(q, plain.begin(order)))
    fails(step, Q, zero(), match="host_finish: no job is open")


def test_the_first_failure_is_kept_and_wakes_waiters(plain: Bench) -> None:
    plain.push([(0, 0, 3)], [[0], [1], [2]])
    plain.push([(0, 0, 2)], [[0], [1]])
    woken = []
    waiter = threading.Thread(target=lambda: woken.append(plain.queue.wait_completed(1, 60.0)))
    waiter.start()
    step = jax.jit(plain.attend)
    text = "q: has 2 rows, the plan's job has 3"
    fails(step, Q, zero(), match=f"INVALID_ARGUMENT: {text}")
    waiter.join(timeout=30)
    assert woken == [False]
    assert plain.queue.poison == text
    fails(step, Q, zero(), match=f"an earlier call failed: {text}")
    with pytest.raises(RuntimeError, match=text):
        plain.push()


def test_an_unknown_or_closed_engine_is_refused(plain: Bench) -> None:
    step = jax.jit(lambda order: host.step_begin(order, engine=9999))
    fails(step, zero(), match="FAILED_PRECONDITION: engine: no open step queue has the number 9999")
    begin = jax.jit(plain.begin)
    plain.push()
    jax.block_until_ready(begin(zero()))
    number = plain.queue.id
    plain.queue.close()
    plain.queue.close()
    fails(begin, zero(), match=f"no open step queue has the number {number}")
    with pytest.raises(ValueError, match="closed"):
        plain.push()
    with pytest.raises(ValueError, match="closed"):
        _ = plain.queue.idle


def _call(plain: Bench, name: str, results: Any, aliases: dict[int, int], *operands: Any) -> Step:
    def step(order: jax.Array) -> Any:
        call = jax.ffi.ffi_call(name, results, has_side_effect=True, input_output_aliases=aliases)
        return call(*operands, plain.begin(order), engine=np.int32(plain.queue.id))

    return jax.jit(step)


def test_operands_are_checked(plain: Bench) -> None:
    shape = (1, GQA.num_kv_heads, BLOCK * GQA.stored_dim)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    f32, f16 = jnp.zeros(shape), jnp.zeros(shape, jnp.float16)
    flat = jnp.zeros((4,))

    def slots(*dims: int) -> tuple[jax.Array, jax.ShapeDtypeStruct]:
        return jnp.zeros(dims), jax.ShapeDtypeStruct(dims, jnp.float32)

    one, one_out = slots(1, *shape)
    small, small_out = slots(2, 2, 2, 7)
    good, good_out = slots(2, *shape)
    after, after_out = slots(1)
    in_place = {0: 0, 1: 1, 2: 2}
    cases: list[tuple[str, str, Any, dict[int, int], tuple[Any, ...]]] = [
        ("blocks: must be float32 or bfloat16", host.STORE, scalar, {1: 0}, (f16,)),
        ("blocks: is .4., must have 3 dimensions", host.STORE, scalar, {1: 0}, (flat,)),
        (
            "blocks: has 1 blocks, the plan's store moves block 1",
            host.STORE,
            scalar,
            {1: 0},
            (f32,),
        ),
        ("order: the result must alias", host.STORE, scalar, {}, (f32,)),
        (
            "slots: is .1, 1, .*, the first dimension must be at least 2",
            host.LOAD,
            (one_out, after_out, scalar),
            in_place,
            (one, after),
        ),
        (
            "slots: a block .* has 56 bytes",
            host.LOAD,
            (small_out, after_out, scalar),
            in_place,
            (small, after),
        ),
        (
            "slots: the result must alias",
            host.LOAD,
            (good_out, after_out, scalar),
            {1: 1, 2: 2},
            (good, after),
        ),
        (
            "slots: has room for 1 slots, the plan's load has 2",
            host.LOAD,
            (good_out, after_out, scalar),
            in_place,
            (good, after),
        ),
    ]
    for text, name, results, aliases, operands in cases:
        plain.queue.close()
        plain.queue = _ffi.StepQueue()
        plain.push(loads=[(0, 0, 2)], stores=[(0, 1)], moves=[(1, 0)])
        fails(_call(plain, name, results, aliases, *operands), zero(), match=text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"storage": "int8"}, 'storage: is "int8"'),
        ({"block": np.int32(0)}, "block: is 0"),
        (
            {"block": np.int32(64)},
            "num_kv_heads, block, key_dim, value_dim and storage make blocks",
        ),
        ({"num_kv_heads": np.int32(3)}, "num_q_heads: 4 is not a multiple of the 3 kv heads"),
        ({"key_dim": np.int32(21)}, "q: is .2, 4, 20., the key_dim is 21"),
        ({"value_in_key": np.int32(2)}, "value_in_key"),
        ({"value_in_key": np.int32(1)}, "value_dim: 24 is more than the key_dim 20"),
    ],
)
def test_attributes_are_checked(plain: Bench, change: dict[str, Any], text: str) -> None:
    attributes: dict[str, Any] = {
        "engine": np.int32(plain.queue.id),
        "num_kv_heads": np.int32(2),
        "key_dim": np.int32(20),
        "value_dim": np.int32(24),
        "value_in_key": np.int32(0),
        "block": np.int32(BLOCK),
        "scale": np.float32(1),
        "storage": "float32",
    }

    def step(q: jax.Array, order: jax.Array) -> Any:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, order)]
        call = jax.ffi.ffi_call(
            host.HOST_START, results, has_side_effect=True, input_output_aliases={0: 0, 1: 1}
        )
        return call(q, plain.begin(order), **{**attributes, **change})

    plain.push([(0, 0, 2)], [[0], [1]])
    fails(jax.jit(step), Q, zero(), match=text)


def test_push_names_what_is_wrong(plain: Bench) -> None:
    with pytest.raises(ValueError, match=r"push: jobs\[1\]: layer is 2, must be in \[0, 2\)"):
        plain.push([(0, 0, 1), (2, 0, 1)], [[0]])
    with pytest.raises(ValueError, match=r"push: table\[0\]: slot is 6, must be in \[0, 6\)"):
        plain.push([(0, 0, 1)], [[6]])
    with pytest.raises(ValueError, match=r"push: moves\[0\]: slot is -1"):
        plain.push(stores=[(0, 1)], moves=[(0, -1)])
    assert plain.queue.idle
