"""Decode steps of a batch, each dispatched before the tokens of the one before are read."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from wscope_jax.cache import InplaceKVCache
from wscope_jax.programs import ModelPrograms
from wscope_jax.sampling import Rows


class _Step(NamedTuple):
    """A step that was dispatched, and the rows that take part in it."""

    rows: tuple[int, ...]
    tokens: jax.Array


class Steps:
    """Decodes one token a row at a time.

    A step takes its tokens from the one before on the device. So the next one can be dispatched while one runs, and the
    device never waits for the host. A row that ends with a token has one more step under way then; what that gives is
    dropped.

    Args:
        programs: of the model.
        cache: of the batch.
        operands: sampling settings of the rows.
    """

    def __init__(self, programs: ModelPrograms, cache: InplaceKVCache, operands: Rows) -> None:
        self._programs, self._cache, self._operands = programs, cache, operands
        self._ahead: _Step | None = None
        self._failure: Exception | None = None

    @property
    def rows_ahead(self) -> tuple[int, ...]:
        """Rows of the step whose tokens come next, if it was dispatched already."""
        return self._ahead.rows if self._ahead else ()

    def take(
        self, ids: Int32[np.ndarray, " B"], may_go_on: Callable[[tuple[int, ...]], bool]
    ) -> tuple[tuple[int, ...], Int32[np.ndarray, " B"]]:
        """The next token of each row that decodes.

        Args:
            ids: tokens that the rows feed, where no step was dispatched ahead.
            may_go_on: whether these rows may take another token, whatever the one under way turns out to be.

        Returns:
            Numbers of the rows, and the tokens of all; NO_TOKEN as in `ModelPrograms.step`.

        Raises:
            WscopeError: see `InplaceKVCache.step`; a failure to dispatch the next step comes with the next call.
            jax.errors.JaxRuntimeError: the step failed on the device.
        """
        if self._failure is not None:
            raise self._failure
        now, self._ahead = self._ahead or self._dispatch(jnp.array(ids)), None
        if may_go_on(now.rows):
            try:
                self._ahead = self._dispatch(now.tokens)
            except Exception as error:  # the tokens of the step before it are not lost
                self._failure = error
        return now.rows, np.asarray(jax.device_get(now.tokens))

    def _dispatch(self, ids: jax.Array) -> _Step:
        tokens, _ = self._programs.step(self._cache, ids, self._operands)
        return _Step(tuple(self._cache.active_rows), tokens)
