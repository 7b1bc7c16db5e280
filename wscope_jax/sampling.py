"""From logits to the next token: what a caller may ask for, and one program for all rows.

A row's draw depends on its logits, its own settings, its number in the call and its position, on
nothing else: not on its neighbours, not on the size of the batch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from wscope_jax.arguments import MOST_SEED, integer, number, shown
from wscope_jax.errors import UsageError

MOST_INT32: Final = 2**31 - 1
MOST_TEMPERATURE: Final = 100.0  # flat long before
MOST_STOPS: Final = 64  # each new piece of text is searched for all of them
MOST_STOP_LENGTH: Final = 1024  # characters; as many may be held back
PRNG: Final = "threefry2x32"  # named, so that jax's default does not change what a seed draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of one row are chosen, and when it ends.

    Attributes:
        max_new_tokens: 1 to 2**31 - 1.
        temperature: 0 to 100; 0 takes the likeliest token, the lowest id among equals.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: above 0, up to 1: of these keep the likeliest whose probabilities reach top_p
            together.
        min_p: 0 to 1: of these keep the ones at least min_p times as likely as the likeliest.
        seed: 0 to 2**63 - 1. Rows of one call with the same seed draw differently: their number in it counts, too.
        stop: up to 64 strings that end the text and are not part of it.
        ignore_eos: go on after an end token.

    Raises:
        UsageError: If a value is outside its range, with field, value and range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    # Whatever a user gives is judged below, also where a test run checks all annotations.
    __no_type_check__: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_integer("max_new_tokens", 1, MOST_INT32)
        self._check_number("temperature", 0.0, MOST_TEMPERATURE)
        self._check_integer("top_k", 0, MOST_INT32)
        self._check_number("top_p", 0.0, 1.0, above_least=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_integer("seed", 0, MOST_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos: expected True or False, got {shown(self.ignore_eos)}")
        self._check_stop()

    def _check_integer(self, name: str, least: int, most: int) -> None:
        # A numpy number becomes Python's.
        object.__setattr__(self, name, integer(name, getattr(self, name), least, most))

    def _check_number(
        self, name: str, least: float, most: float, above_least: bool = False
    ) -> None:
        value = number(name, getattr(self, name), least, most, above_least=above_least)
        object.__setattr__(self, name, value)

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple):
            raise UsageError(
                f"stop: expected a tuple of strings such as ('END',), got {shown(self.stop)}"
            )
        if len(self.stop) > MOST_STOPS:
            raise UsageError(f"stop: expected at most {MOST_STOPS} strings, got {len(self.stop)}")
        for string in self.stop:
            if not isinstance(string, str) or not 1 <= len(string) <= MOST_STOP_LENGTH:
                raise UsageError(
                    f"stop: expected 1 to {MOST_STOP_LENGTH} characters a string, got {shown(string)}"
                )


class Greedy(NamedTuple):
    """Every row takes its likeliest token: nothing is drawn, so nothing is sorted."""

    def only(self, row: int) -> "Greedy":
        """Settings of one row alone."""
        del row
        return self


class RowSampling(NamedTuple):
    """Settings of the rows of a batch, as operands of a compiled step.

    Attributes:
        temperature: [B] float32; 0 is greedy.
        top_k: [B] int32; 0 is off.
        top_p: [B] float32.
        min_p: [B] float32.
        key: [B, 2] uint32, data of the key that the row's seed makes.
        row: [B] int32, the row's number in the call.
    """

    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    key: UInt32[Array, "B 2"]
    row: Int32[Array, " B"]

    def only(self, row: int) -> "RowSampling":
        """Settings of one row alone."""
        return RowSampling(*(field[row : row + 1] for field in self))


Rows = Greedy | RowSampling


def row_operands(samplings: Sequence[Sampling], row_ids: Sequence[int] | None = None) -> Rows:
    """Settings of a batch's rows as operands of a step; nothing is compiled for it.

    Args:
        samplings: one per row of the batch.
        row_ids: each row's number in the call, which stays the row's own however rows are grouped
            into batches; 0, 1, 2, ... if not given.
    """
    ids = range(len(samplings)) if row_ids is None else row_ids
    if len(ids) != len(samplings):
        raise UsageError(f"row_ids: expected {len(samplings)} numbers, one per row, got {len(ids)}")
    if all(sampling.temperature == 0 for sampling in samplings):
        return Greedy()
    keys = [(sampling.seed >> 32, sampling.seed & 0xFFFFFFFF) for sampling in samplings]
    return RowSampling(
        temperature=jnp.asarray(np.array([s.temperature for s in samplings], np.float32)),
        top_k=jnp.asarray(np.array([s.top_k for s in samplings], np.int32)),
        top_p=jnp.asarray(np.array([s.top_p for s in samplings], np.float32)),
        min_p=jnp.asarray(np.array([s.min_p for s in samplings], np.float32)),
        key=jnp.asarray(np.array(keys, np.uint32).reshape(-1, 2)),
        row=jnp.asarray(np.array(ids, np.int32)),
    )


def sample(
    logits: Float32[Array, "B N"], rows: Rows, positions: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """The next token of each row.

    Order: temperature, top-k, top-p, min-p. Among equal logits the lower id ranks first, so top-k
        keeps exactly k tokens and top_k = 1 is greedy. The key of a row is its seed's, folded with
        its number in the call and with `positions`. Logits may be -inf; a token with such logits is
        never drawn while another has more.

    Args:
        logits: scores of all tokens.
        rows: settings of the rows.
        positions: position of the token to be chosen, in its sequence.
    """
    with jax.named_scope("sample"):
        greedy_B = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if isinstance(rows, Greedy):
            return greedy_B
        drawn_B = _draw(logits, rows, positions)
        return jnp.where(rows.temperature > 0, drawn_B, greedy_B)


def _draw(
    logits: Float32[Array, "B N"], rows: RowSampling, positions: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """A token of each row at its temperature; greedy rows give any token."""
    is_drawn_B1 = (rows.temperature > 0)[:, None]
    temperature_B1 = jnp.where(is_drawn_B1, rows.temperature[:, None], 1.0)
    top_B1 = jnp.max(logits, axis=-1, keepdims=True)
    # The likeliest token has score 0 by rule: infinity minus infinity would be a NaN.
    scores_BN = jnp.where(logits == top_B1, 0.0, (logits - top_B1) / temperature_B1)
    ids_BN = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    costs_BN, ids_BN = lax.sort((-scores_BN, ids_BN), num_keys=1, is_stable=True)
    ranked_BN = jnp.where(_kept(-costs_BN, rows), -costs_BN, -jnp.inf)
    noise_BN = jax.vmap(functools.partial(_noise, logits.shape[1]))(rows.key, rows.row, positions)
    rank_B = jnp.argmax(ranked_BN + noise_BN, axis=-1)
    return jnp.take_along_axis(ids_BN, rank_B[:, None], axis=-1)[:, 0]


def _kept(ranked_BN: Float32[Array, "B N"], rows: RowSampling) -> Bool[Array, "B N"]:
    """Which tokens may be drawn: a prefix of each row, whose scores descend from 0."""
    rank_BN = lax.broadcasted_iota(jnp.int32, ranked_BN.shape, 1)
    weight_BN = jnp.exp(ranked_BN)
    in_top_k_BN = (rank_BN < rows.top_k[:, None]) | (rows.top_k <= 0)[:, None]
    # Probabilities are those among the k kept. The sums are a tree of fixed shape, equal in any
    # batch.
    mass_BN: Float32[Array, "B N"] = lax.associative_scan(
        jnp.add, jnp.where(in_top_k_BN, weight_BN, 0.0), axis=1
    )
    before_BN = jnp.pad(mass_BN[:, :-1], ((0, 0), (1, 0)))
    reached_BN = before_BN >= rows.top_p[:, None] * mass_BN[:, -1:]
    in_top_p_BN = ~reached_BN | (rows.top_p >= 1)[:, None]
    in_min_p_BN = weight_BN >= rows.min_p[:, None]
    kept_BN: Bool[Array, "B N"] = (in_top_k_BN & in_top_p_BN & in_min_p_BN) | (rank_BN == 0)
    return kept_BN


def _noise(
    vocab_size: int,
    key_data: UInt32[Array, " 2"],
    row: Int32[Array, ""],
    position: Int32[Array, ""],
) -> Float32[Array, " N"]:
    """Gumbel noise of one row; where score plus noise is largest is a draw from the softmax."""
    key = jax.random.wrap_key_data(key_data, impl=PRNG)
    key = jax.random.fold_in(jax.random.fold_in(key, row), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)
