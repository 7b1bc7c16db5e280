"""The seam to the C++ side: every movement of bytes and the attention of the CPU, as XLA custom calls.

Each target has one name and one registration per platform, so the traced program is the same everywhere. The calls
have side effects that XLA cannot see; what orders them is `order`, one int32 that is aliased through all of them,
and the activations that are threaded through as in-place aliases (docs/architecture.md, "The seam").
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Int32

from wscope_jax.errors import MachineError
from wscope_jax.layout import EntryLayout
from wscope_jax.partial import Partial

try:
    from wscope_jax import _ffi
except ImportError as error:  # a source tree without its compiled module
    raise ImportError(
        "wscope_jax._ffi: the compiled module is missing or does not fit this Python "
        f"({error}); install the project with `make install` or `pip install -e .`"
    ) from error

STEP_BEGIN: Final = "wscope_step_begin"
HOST_START: Final = "wscope_host_start"
HOST_FINISH: Final = "wscope_host_finish"
LOAD: Final = "wscope_load"
STORE: Final = "wscope_store"

ISA_VARIABLE: Final = "WSCOPE_ISA"  # forces one instruction set for the attention of the CPU

log = logging.getLogger(__name__)


def select_isa() -> None:
    """Makes the instruction set of `WSCOPE_ISA` the path of every shape; unset = the best for each.

    Raises:
        MachineError: this build or this processor has no such instruction set.
    """
    name = os.environ.get(ISA_VARIABLE, "")
    try:
        _ffi.force_isa(name)
    except (ValueError, RuntimeError) as error:
        raise MachineError(
            f"{ISA_VARIABLE}: {error}; here there are {', '.join(_ffi.isas())}; unset it to get the best one"
        ) from None
    if refusal := _ffi.amx_refusal():
        log.warning("attention on the CPU: %s; using %s", refusal, _ffi.isas()[-1])


select_isa()

PLATFORMS: Final = ("cpu",) if _ffi.cuda_refusal() else ("cpu", "CUDA")

for _platform in PLATFORMS:
    for _name, _capsule in _ffi.registrations(_platform).items():
        jax.ffi.register_ffi_target(_name, _capsule, platform=_platform)


# `jax.ffi.ffi_call` tells JAX of a side effect as well, and JAX dispatches a program that has one in Python:
# milliseconds a step with some hundred arrays. XLA alone has to know: no program drops `order`.
_call = Primitive("wscope_call")
_call.multiple_results = True


def _results(*_: Any, results: tuple[Any, ...], **__: Any) -> list[Any]:
    return list(results)


def _run(*operands: Array, **static: Any) -> list[Array]:
    """Outside of `jit`; the handlers are XLA's, so there is no other way to make a call."""
    out: list[Array] = _jitted(tuple(static.items()))(*operands)
    return out


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(_call.bind, **dict(static)))


def _lower(
    context: Any, *operands: Any, target: str, aliases: Any, attributes: Any, **_: Any
) -> Any:
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=dict(aliases))
    return rule(context, *operands, **dict(attributes))


_call.def_abstract_eval(_results)
_call.def_impl(_run)
mlir.register_lowering(_call, _lower)


def call(
    target: str,
    operands: Sequence[Array],
    results: Sequence[Array],
    aliases: dict[int, int],
    **attributes: np.generic | str,
) -> list[Array]:
    """Calls a target with side effects.

    Args:
        target: its name.
        operands: what it takes; one of them is the order.
        results: arrays, or shapes and dtypes, like those that it gives.
        aliases: number of the operand -> number of the result that takes its place.
        attributes: of the call, static.
    """
    out: list[Array] = _call.bind(
        *operands,
        target=target,
        results=tuple(jax.core.ShapedArray(r.shape, r.dtype) for r in results),
        aliases=tuple(aliases.items()),
        attributes=tuple(attributes.items()),
    )
    return out


def _not_a_slice(array: Array, order: Int32[Array, ""]) -> Array:
    """The same numbers, as an operand that a call may alias.

    XLA:GPU lets a call read a contiguous slice where it lies in the larger array, and drops the alias. `order` is zero,
    which XLA cannot know; the sum is part of the loop that makes the array.
    """
    out: Array = jax.lax.platform_dependent(
        array, order, default=lambda x, _: x, cuda=lambda x, zero: x + zero.astype(x.dtype)
    )
    return out


def step_begin(order: Int32[Array, ""], *, engine: int) -> Int32[Array, ""]:
    """Makes the oldest pushed plan current; fails if the plan before it was not used up."""
    (order,) = call(STEP_BEGIN, (order,), (order,), {0: 0}, engine=np.int32(engine))
    return order


def host_start(
    q: Float[Array, "B H K"],
    order: Int32[Array, ""],
    *,
    layout: EntryLayout,
    block: int,
    scale: float,
    storage: str,
    engine: int,
) -> tuple[Float[Array, "B H K"], Int32[Array, ""]]:
    """Starts the plan's next host job: the CPU attends to UNPINNED blocks with these queries.

    Returns at once. Use the returned q for the work that goes on meanwhile, so that XLA keeps it behind the start.
    """
    q = _not_a_slice(q, order)
    q, order = call(
        HOST_START,
        (q, order),
        (q, order),
        {0: 0, 1: 1},
        engine=np.int32(engine),
        num_kv_heads=np.int32(layout.num_kv_heads),
        key_dim=np.int32(layout.key_dim),
        value_dim=np.int32(layout.value_dim),
        value_in_key=np.int32(layout.value_in_key),
        block=np.int32(block),
        scale=np.float32(scale),
        storage=storage,
    )
    return q, order


def host_finish(
    window: Partial, streamed: Partial, order: Int32[Array, ""], *, engine: int
) -> tuple[Partial, Partial, Partial, Int32[Array, ""]]:
    """Waits for the oldest open host job.

    The partials of the other regions go in and come out as aliases: that keeps their computation before the wait.

    Returns:
        The window's and the streamed partial, the host's partial, and the order.
    """
    operands = (window.o, window.lse, streamed.o, streamed.lse, order)
    results = (*operands, window.o, window.lse)
    aliases = {i: i for i in range(len(operands))}
    w_o, w_lse, s_o, s_lse, order, o, lse = call(
        HOST_FINISH, operands, results, aliases, engine=np.int32(engine)
    )
    return Partial(w_o, w_lse), Partial(s_o, s_lse), Partial(o, lse), order


def load(
    slots: Float[Array, "slots C G E"],
    after: Float[Array, "..."],
    order: Int32[Array, ""],
    *,
    engine: int,
) -> tuple[Float[Array, "slots C G E"], Float[Array, "..."], Int32[Array, ""]]:
    """Brings the plan's next chunk of PINNED slots into the PING-PONG slot whose turn it is, in place.

    Args:
        slots: the PING-PONG region.
        after: float32 result of the attention over the chunk before; puts this call behind it.
        order: see the module.
        engine: id of the step queue.
    """
    operands = (slots, after, order)
    aliases = {i: i for i in range(len(operands))}
    slots, after, order = call(LOAD, operands, operands, aliases, engine=np.int32(engine))
    return slots, after, order


def store(
    blocks: Float[Array, "n G E"], order: Int32[Array, ""], *, engine: int
) -> Int32[Array, ""]:
    """Sends packed blocks to the slots that the plan's next store names; what it does not name stays.

    When the call has returned, `blocks` belongs to XLA again; the bytes are in their slots when the queue's
    `completed` counter has passed the store's ticket.
    """
    (order,) = call(STORE, (blocks, order), (order,), {1: 0}, engine=np.int32(engine))
    return order
