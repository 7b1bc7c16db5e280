"""Programs that are compiled ahead, on a thread of their own."""

import os
import threading

import jax
import jax.numpy as jnp

from wscope_jax.compiled import LEAST_PRIORITY, CompiledPrograms


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_what_is_compiled_ahead_gives_way_to_steps() -> None:
    programs, before, traced = CompiledPrograms(), priority(), []

    def fn(x: jax.Array) -> jax.Array:
        traced.append((threading.current_thread().name, priority()))
        return x + 1

    programs.prepare("ahead", fn, (jnp.zeros(2),))
    programs.settle()
    assert programs.compiles == {"warmup": 0, "ahead": 1, "stall": 0}
    assert (programs.call("ahead", fn, (jnp.zeros(2),)) == 1).all()
    ((name, least),) = traced
    assert name.startswith("wscope-compile")
    assert least == LEAST_PRIORITY
    assert priority() == before
    programs.close()
