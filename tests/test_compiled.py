"""Programs that are compiled ahead, on a thread of their own."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from wscope_jax.compiled import COMPILER_OPTIONS, LEAST_PRIORITY, SHORT_TURN_S, CompiledPrograms


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_what_is_compiled_ahead_gives_way_to_steps() -> None:
    programs, before, traced = CompiledPrograms(), priority(), []
    turn_before = sys.getswitchinterval()
    assert turn_before > SHORT_TURN_S

    def fn(x: jax.Array) -> jax.Array:
        traced.append((threading.current_thread().name, priority(), sys.getswitchinterval()))
        return x + 1

    programs.prepare("ahead", fn, (jnp.zeros(2),))
    programs.settle()
    assert programs.compiles == {"warmup": 0, "ahead": 1, "stall": 0}
    assert (programs.call("ahead", fn, (jnp.zeros(2),)) == 1).all()
    ((name, least, turn_s),) = traced
    assert name.startswith("wscope-compile")
    assert least == LEAST_PRIORITY
    assert turn_s == pytest.approx(SHORT_TURN_S)
    programs.close()  # the thread has ended
    assert priority() == before
    assert sys.getswitchinterval() == turn_before


def test_programs_are_compiled_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are worth shows on a GPU; that this version of JAX knows them shows anywhere."""
    told: list[object] = []

    def jit(fn: Callable[..., Any], **options: Any) -> Any:
        told.append(options["compiler_options"])
        return real(fn, **options)

    real = jax.jit
    monkeypatch.setattr(jax, "jit", jit)
    programs = CompiledPrograms()
    assert (programs.call("now", lambda x: x + 1, (jnp.zeros(2),)) == 1).all()
    programs.prepare("ahead", lambda x: x + 2, (jnp.zeros(2),))
    programs.settle()
    programs.close()
    assert told == [COMPILER_OPTIONS] * 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        real(lambda x: x, compiler_options={**COMPILER_OPTIONS, "no_such_option": 1})(1)
