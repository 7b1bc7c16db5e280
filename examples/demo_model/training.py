"""The training: a curriculum of ever longer texts, by steps or by the clock, and what is measured on the way."""

import collections
import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo_model.network import Arithmetic, Params, Shape, forward
from demo_model.sequences import DIGIT, PROSE, Batch, Sampler, start, stream
from wscope_jax.demo_text import NUM_DIGITS

ANSWER_WEIGHT: Final = 1.0  # of the mean loss of an answer's digit, beside that of a byte of prose
BALANCE_WEIGHT: Final = 0.01
# The text is read some hundred times: without these two the model learns it by heart.
DROPOUT: Final = 0.2
WEIGHT_DECAY: Final = 1.0  # of the matrices, per step and learning rate
RANDOM: Final = "rbg"  # dropout's generator: the default one would take much of the time
RATE: Final = 3e-3  # the highest
WARM_UP: Final = 0.02  # part of the training
LAST_RATE: Final = 0.01  # of the highest learning rate
IN_FLIGHT: Final = 3  # steps that the device may lag behind, so that the clock tells the truth
QUEUED: Final = 4  # batches drawn ahead, per process
REPORT_S: Final = 20.0
HELD_OUT_BATCH: Final = 1 << 20  # index of the batch that is measured; training does not get there


class Phase(NamedTuple):
    """A part of the training.

    Attributes:
        length: bytes to predict in a sequence.
        batch: sequences in a step.
        share: part of the steps or of the time.
    """

    length: int
    batch: int
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how to train.

    Attributes:
        phases: one after the other; their shares add up to one.
        deadline: value of `time.monotonic` at which to end, where `steps` is None.
        steps: steps of all phases together. With it, equal seeds give equal models on equal machines.
        seed: of the parameters, of the texts and of the dropout.
        num_processes: that draw batches.
    """

    phases: Sequence[Phase]
    deadline: float
    steps: int | None
    seed: int
    num_processes: int


def train(
    params: Params,
    shape: Shape,
    arithmetic: Arithmetic,
    plan: Plan,
    texts: tuple[Sampler, Sampler],
    report: Callable[[Params, Phase, dict[str, float]], None],
) -> Params:
    """The trained parameters.

    Args:
        params: initial parameters; their memory is taken over.
        shape: of the model.
        arithmetic: of the training.
        plan: see there.
        texts: to learn from, and held out.
        report: gets the parameters, the phase and what was measured, from time to time and after each phase.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(WEIGHT_DECAY, lambda tree: jax.tree.map(_is_matrix, tree)),
    )
    state = (params, optimizer.init(params))
    pool = start(texts[0], plan.num_processes)
    compiled = _compile_ahead(state, shape, arithmetic, plan, optimizer)
    clock = _Clock(plan)
    step, losses = 0, jnp.full(3, jnp.nan)
    for place, phase in enumerate(plan.phases):
        run, measure = (program.result() for program in compiled[place])
        if place == 0:
            clock.start()
        held = texts[1].batch(HELD_OUT_BATCH, phase.batch, phase.length)
        batches = stream(pool, phase.batch, phase.length, QUEUED * plan.num_processes)
        flight: collections.deque[jax.Array] = collections.deque()
        last_report = time.monotonic()
        end = sum(other.share for other in plan.phases[: place + 1])
        while (progress := clock.progress(step)) < end - 1e-9:
            key = jax.random.fold_in(jax.random.key(plan.seed, impl=RANDOM), step)
            rate = jnp.float32(_rate(progress) * RATE)
            state, losses = run(state, *next(batches), rate, key)
            step += 1
            flight.append(losses)
            if len(flight) > IN_FLIGHT:
                flight.popleft().block_until_ready()
            if time.monotonic() - last_report > REPORT_S:
                report(state[0], phase, _figures(step, progress, losses, measure, state[0], held))
                last_report = time.monotonic()
        batches.close()
        report(state[0], phase, _figures(step, progress, losses, measure, state[0], held))
    pool.shutdown(cancel_futures=True)
    return state[0]


class _Clock:
    """How much of the training is done, from 0 to 1."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()

    def progress(self, step: int) -> float:
        if self._plan.steps is not None:
            return step / self._plan.steps
        passed = time.monotonic() - self._began
        return min(1.0, passed / max(1e-9, self._plan.deadline - self._began))


def _rate(progress: float) -> float:
    """Of the highest learning rate: up in a line, down in a cosine."""
    if progress < WARM_UP:
        return progress / WARM_UP
    fall = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return LAST_RATE + (1 - LAST_RATE) * fall


def _is_matrix(array: jax.Array) -> bool:
    return array.ndim > 1 and array.shape[-2] > 1 and array.size > 1 << 12


def _compile_ahead(
    state: Any,
    shape: Shape,
    arithmetic: Arithmetic,
    plan: Plan,
    optimizer: optax.GradientTransformation,
) -> list[tuple[concurrent.futures.Future[Any], concurrent.futures.Future[Any]]]:
    """Per phase its step and its measurement, compiled while earlier phases run."""

    def step(state: Any, ids: Any, kinds: Any, rate: jax.Array, key: jax.Array) -> Any:
        params, moments = state
        gradient, losses = jax.grad(_loss, has_aux=True)(params, ids, kinds, shape, arithmetic, key)
        updates, moments = optimizer.update(gradient, moments, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return (params, moments), losses

    exact = dataclasses.replace(arithmetic, dropout=0.0)

    def measure(params: Params, ids: Any) -> tuple[jax.Array, jax.Array]:
        return predict(params, ids, shape, exact)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
    scalar, key = jax.ShapeDtypeStruct((), jnp.float32), jax.random.key(0, impl=RANDOM)
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(plan.phases) * 2)

    def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
        return pool.submit(lambda: jax.jit(function, **options).lower(*arguments).compile())

    programs = []
    for phase in plan.phases:
        ids = jax.ShapeDtypeStruct((phase.batch, phase.length + 1), jnp.uint8)
        programs.append(
            (
                compiled(step, shapes, ids, ids, scalar, key, donate_argnums=0),
                compiled(measure, shapes[0], ids),
            )
        )
    return programs


def _loss(
    params: Params,
    ids: jax.Array,
    kinds: jax.Array,
    shape: Shape,
    arithmetic: Arithmetic,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What is minimised, and its parts: prose and answers (nats per byte), unevenness."""
    ids = ids.astype(jnp.int32)
    logits_BTV, unevenness = forward(params, ids[:, :-1], shape, arithmetic, key)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids[:, 1:])

    def mean(kind: int) -> jax.Array:
        chosen = (kinds[:, 1:] == kind).astype(jnp.float32)
        return jnp.sum(loss_BT * chosen) / jnp.maximum(chosen.sum(), 1)

    prose, answers = mean(PROSE), mean(DIGIT)
    total = prose + ANSWER_WEIGHT * answers + BALANCE_WEIGHT * unevenness
    return total, jnp.stack([prose, answers, unevenness])


def predict(
    params: Params, ids: jax.Array, shape: Shape, arithmetic: Arithmetic
) -> tuple[jax.Array, jax.Array]:
    """For each byte but the first: its loss in nats, and whether it was the likeliest; [B, T] each."""
    ids = ids.astype(jnp.int32)
    logits_BTV, _ = forward(params, ids[:, :-1], shape, arithmetic, jax.random.key(0))
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids[:, 1:])
    return loss_BT, jnp.argmax(logits_BTV, axis=-1) == ids[:, 1:]


def _figures(
    step: int, progress: float, losses: jax.Array, measure: Any, params: Params, held: Batch
) -> dict[str, float]:
    """The last step's losses, and on held-out text bits per byte and the share of right answers."""
    prose, answers, unevenness = (float(loss) for loss in losses)
    loss_BT, is_best_BT = (np.asarray(array) for array in measure(params, held.ids))
    kinds_BT = held.kinds[:, 1:]
    answers_right = is_best_BT[kinds_BT == DIGIT].reshape(-1, NUM_DIGITS).all(axis=1)
    return {
        "step": step,
        "progress": progress,
        "prose_bits": prose / math.log(2),
        "answer_nats": answers,
        "unevenness": unevenness,
        "held_out_bits": float(loss_BT[kinds_BT == PROSE].mean()) / math.log(2),
        "held_out_right": float(answers_right.mean()) if answers_right.size else math.nan,
    }
