"""Arguments of a wrong type: a UsageError of one line that begins with the argument's name, before anything runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import processes
from tests.engines import CHECKPOINTS
from wscope_jax import (
    Engine,
    EntryLayout,
    InplaceKVCache,
    Roofline,
    Sampling,
    Stream,
    plan,
    policies,
)
from wscope_jax.errors import UsageError
from wscope_jax.roofline import StepTiming

DIRECTORY = CHECKPOINTS["qwen3_moe"]
ONE = Sampling(max_new_tokens=1)
HUGE = 10**5000  # no float is so large, and Python writes no integer of so many digits


class Mute:
    """An object that cannot say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("mute")


# None of these is a number, a policy, a model, a path ...
WRONG = (1 + 2j, Mute(), object, b"x", [[]], {"a": 1}, np.zeros((2, 3)), lambda: 1, Sampling)
LAYOUT = EntryLayout(num_kv_heads=2, key_dim=16, value_dim=16)
COSTS = {"cpu_s_per_entry": 1e-6, "link_s_per_entry": 1e-6}


def refuses(name: str, call: Callable[[Any], Any], also: tuple[Any, ...] = ()) -> None:
    for value in (*WRONG, *also):
        with pytest.raises(UsageError) as caught:
            call(value)
        said = str(caught.value)
        assert said.startswith((f"{name}: ", f"{name}.")), (value, said)
        assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("policy", (3, None, "x")),
        ("window", (1.5, None, 31)),
        ("gpu_memory", (0, "1GB")),
        ("host_memory", (1.5, True)),
        ("spare_memory", (-1, None, "1GB")),
        ("threads", (0, "2")),
        ("progress", (3, None, "x")),
        ("check_tensors", (3, None, "x")),
    ],
)
def test_from_pretrained(name: str, also: tuple[Any, ...]) -> None:
    refuses(name, lambda value: Engine.from_pretrained(DIRECTORY, **{name: value}), also)


def test_directory() -> None:
    refuses("directory", Engine.from_pretrained, (3, None))


def test_engine(eng: Engine) -> None:
    refuses("model", Engine, (3, None, "x"))
    for name, also in (
        ("eos_ids", (3, None, "x", {-1})),
        ("tokenizer", (3, "x")),
        ("progress", (3,)),
    ):
        refuses(name, lambda value, name=name: Engine(eng.model, **{name: value}), also)
    refuses("policy", lambda value: setattr(eng, "policy", value), (None, "cpu_only"))


def test_calls(eng: Engine) -> None:
    for policy in (*WRONG, "", 0, [], "cpu_only"):
        for call in (
            lambda policy: eng.generate([[1]], ONE, policy=policy),
            lambda policy: eng.score([1, 2], 1, policy=policy),
        ):
            with pytest.raises(UsageError, match=r"^policy: expected"):
                call(policy)
    for prompts in (np.array(5), [np.array(5)], np.zeros(3)):
        with pytest.raises(UsageError, match=r"^prompts: "):
            eng.generate(prompts, ONE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^tokens: .*rows of one length"):
        eng.score([[1, 2], [3]], 1)
    for ids in (None, 3, "x", b"x", np.zeros(3), np.ones((2, 2), int), [1.5], []):
        with pytest.raises(UsageError, match=r"^(prompts?|tokens)( 0)?[: ]"):
            eng.find_broken(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "host_memory",
        "gpu_memory",
        "machine_memory",
        "spare_memory",
        "weights",
        "position_limit",
        "itemsize",
        "chunk_entries",
    ],
)
def test_plan(name: str) -> None:
    how = {"policy": policies.CpuOnly(), "batch": 1, "max_len": 64, "window": 32}
    refuses(name, lambda value: plan([[Stream(LAYOUT)]], **{**how, name: value}), (-1, 1.5, "x"))


@pytest.mark.parametrize("name", ["host_memory", "chunk_entries", "dtype", "compiled"])
def test_cache(name: str) -> None:
    how = {"policy": policies.CpuOnly(), "batch": 1, "max_len": 64, "window": 32}
    refuses(
        name, lambda value: InplaceKVCache([[Stream(LAYOUT)]], **{**how, name: value}), (-1, 1.5)
    )


def test_programs_that_are_none() -> None:
    how = {"policy": policies.Resident(), "batch": 1, "max_len": 64, "window": 32}
    with InplaceKVCache([[Stream(LAYOUT)]], **how) as cache:
        cache.begin_prompt(0, 3)
        for value in (None, 3, "x"):
            with pytest.raises(UsageError, match="fn: expected a function of the views"):
                cache.write_prompt(0, [0], value)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="store_delay_ms: expected an integer"):
            cache.set_fault(store_delay_ms="x")  # type: ignore[arg-type]


def test_values() -> None:
    sizes = {"num_kv_heads": 2, "key_dim": 16, "value_dim": 16}
    refuses("value_in_key", lambda value: EntryLayout(**sizes, value_in_key=value), (1, None))
    refuses("kind", lambda value: Stream(LAYOUT, value), (None,))
    for name in ("cpu_s_per_entry", "link_fixed_s", "nudge"):
        refuses(
            name,
            lambda value, name=name: Roofline(**{**COSTS, name: value}),
            ("x", True, HUGE, 2e3),
        )
    for name in ("cpu_samples", "link_samples", "nudge_samples"):
        wrong = ("x", True, (math.inf,) * 5, (1e308,), (-HUGE,))
        refuses(name, lambda value, name=name: Roofline(**{**COSTS, name: value}), wrong)
    refuses("num_placed", Roofline(**COSTS).cpu_share, ("x", None, -1))
    times = dict.fromkeys((field.name for field in dataclasses.fields(StepTiming)), 1)
    for name in times:
        refuses(
            name, lambda value, name=name: StepTiming(**{**times, name: value}), ("x", None, True)
        )
    refuses("timing", Roofline(**COSTS).observe, (3, None))
    refuses("policy", policies.choose, (3, None))
    refuses("policy.schedule", lambda value: policies.require(policies.CpuOnly(value)), (3, None))


PROGRAM = f"""
import warnings
import jax.numpy as jnp
import numpy as np
from wscope_jax import *
from wscope_jax.errors import UsageError
from wscope_jax.ops import host_attention

WRONG = (1 + 2j, object(), object, b"x", [[]], {{"a": 1}}, np.zeros((2, 3)), lambda: 1, Sampling)

def refuses(call, arguments, **also):
    for name in also:
        for value in (*WRONG, *also[name]):
            try:
                call(**{{**arguments, name: value}})
            except UsageError as error:
                said = str(error)
                assert said.startswith((name + ": ", name + ".")) and chr(10) not in said, said
            else:
                raise AssertionError((call, name, value))

layout = EntryLayout(num_kv_heads=2, key_dim=16, value_dim=8)
cache = InplaceKVCache([[Stream(layout)]], policy=policies.Resident(), batch=2, max_len=64, window=32)

def entries(num, heads=2):
    return Entries(jnp.zeros((num, heads, 16)), jnp.zeros((num, heads, 8)))

step = dict(q=jnp.zeros((2, 4, 16)), entries=entries(2), view=cache.views[0], scale=0.25)
attend(**step, sink=jnp.zeros(4))
refuses(attend, step, q=(None, 3, jnp.zeros((3, 4, 16)), jnp.zeros((2, 3, 16)), jnp.zeros((2, 0, 16))),
        entries=(None, entries(3), entries(2, 1)),
        view=(None, cache.views), scale=(None, 0, "x", 1e-46, 1e39), sink=(3, jnp.zeros(3)))
prompt = dict(q=jnp.zeros((32, 4, 16)), entries=entries(32), view=cache.views[0], scale=0.25,
              row=jnp.int32(0), length=jnp.int32(3))
attend_prompt(**prompt)
refuses(attend_prompt, prompt, q=(None, 3, jnp.zeros((32, 3, 16)), jnp.zeros((32, 0, 16))),
        entries=(None, entries(3)), view=(None,), scale=(None,),
        row=(None, 1.5), length=(None, "x"), attended=(3, entries(31),
        Entries(jnp.zeros((32, 2, 16)), None), Entries(jnp.zeros((32, 2, 15)), jnp.zeros((32, 2, 8))),
        Entries(jnp.zeros((32, 2, 16)), jnp.zeros((32, 1, 8)))))
for tokens in (0, 33):  # not whole blocks
    refuses(lambda q: attend_prompt(**{{**prompt, "q": jnp.zeros((tokens, 4, 16)), "entries": entries(tokens)}}),
            {{}}, q=(1,))
two = EntryLayout(num_kv_heads=2, key_dim=16, value_dim=8, tokens_per_entry=2)
for streams in ([[Stream(two)]], [[Stream(layout)] * 2], [[Stream(layout)], [Stream(two)]]):
    refuses(lambda streams, each: InplaceKVCache(
        each, policy=policies.Resident(), batch=1, max_len=64), dict(each=streams), streams=(1,))
refuses(lambda kind: Stream(layout, kind), {{}}, kind=("resident",))
key = jnp.zeros((2, 8, 2, 16))
arrays = dict(q=step["q"], key=key, value=key, lengths=jnp.array([3, 4], jnp.int32))
host_attention(**arrays)
with warnings.catch_warnings(action="error"):
    host_attention(**arrays | dict(lengths=np.array([3, 4], np.int64)))
refuses(host_attention, arrays, q=(None, 3, step["q"][:, :0]), key=(None, key[:1], key[:, :, :0]),
        value=(3, key[..., :0], key.astype("float16")), lengths=(None, [3, 4]),
        scale=("x", 0, 1e-46, 1e39), value_dim=(0, 17), select=(3,), sink=(3,), block=(0, 33, None, 2**31, 2**70))
refuses(lambda partials: merge(partials), {{}}, partials=(None, 3))
one = Partial(jnp.zeros((1, 2, 4)), jnp.zeros((1, 2)))
for partials in ((), (one, 3), (one, Partial(jnp.zeros((2, 2, 4)), jnp.zeros((2, 2)))),
                 (one, Partial(jnp.zeros((1, 2, 1)), one.lse)), (Partial(one.o, jnp.zeros(2)),),
                 (Partial(1.0, 2.0),), (Partial(None, None),), (one, Partial(one.o, None))):
    try:
        merge(*partials)
    except UsageError:
        continue
    raise AssertionError(partials)
checkpoint = dict(directory={str(DIRECTORY)!r})
config = models.read_config(**checkpoint)
refuses(models.read_config, checkpoint, directory=(3, None))
refuses(models.load, checkpoint, directory=(3, None), dtype=(0, "", "int8"), check_all=(3, None))
refuses(Engine.from_pretrained, checkpoint, dtype=(0, "", "int8"))
refuses(models.read_file, {{}}, path=(3, None))
for call in (models.abstract, lambda config, dtype: models.random(config, 0, dtype)):
    refuses(call, dict(config=config, dtype="float32"), config=(None, 3), dtype=(None, "int8"))
refuses(lambda seed: models.random(config, seed, "float32"), {{}}, seed=(-1, None, 2**63))
refuses(lambda checkpoint: models.places(config, checkpoint), {{}}, checkpoint=(None, 3))
"""


def test_functions_of_arrays() -> None:
    """In a process of its own: where the test run checks annotations, that would come first."""
    with processes.python(processes.environment(), "-c", PROGRAM) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err.decode()
