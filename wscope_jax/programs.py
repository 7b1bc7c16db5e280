"""The jitted programs of the engine: a decode step, one layer of a prefill, and what stands before and after.

Weights travel as flat lists of arrays, split from their module once: flattening a module at every call would cost
more than a small step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from wscope_jax.attention import attend_prompt
from wscope_jax.cache import InplaceKVCache
from wscope_jax.sampling import Rows, sample
from wscope_jax.schedules import Schedule
from wscope_jax.step_plan import turn_bucket
from wscope_jax.views import View, Views

Leaves = list[jax.Array]

NO_TOKEN: Final = -1  # in place of a token where the logits are not finite


@dataclasses.dataclass(frozen=True)
class Split:
    """A module taken apart: arrays, and how to put them together again."""

    leaves: Leaves
    treedef: Any
    graphdef: Any

    @classmethod
    def of(cls, module: nnx.Module) -> "Split":
        """Splits a module; the arrays are not copied."""
        graphdef, state = nnx.split(module)
        leaves, treedef = jax.tree.flatten(state)
        return cls(leaves, treedef, graphdef)

    def join(self, leaves: Leaves) -> Any:
        """The module with `leaves` in place of its arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


class ModelPrograms:
    """Programs of one model; compiled forms are kept and counted by the cache that they run over.

    Args:
        model: see `models`.
    """

    def __init__(self, model: Any) -> None:
        self.num_layers: int = model.num_layers
        self._model = Split.of(model)
        self._layers = [Split.of(layer) for layer in model.layers]
        self._kinds = [model.layer_kind(i) for i in range(model.num_layers)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's arrays."""
        return sum(leaf.nbytes for leaf in self._model.leaves)

    # --- decode -----------------------------------------------------------------------------------------------------

    def step(
        self, cache: InplaceKVCache, ids: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array]:
        """One decode step of the cache's active rows.

        Args:
            cache: the cache.
            ids: int32 [B], the token that each row feeds.
            rows: sampling settings of each row.

        Returns:
            The next tokens int32 [B], NO_TOKEN in rows whose logits are not finite, and logits float32 [B, vocabulary].
        """

        def run(views: Views) -> tuple[Views, tuple[jax.Array, jax.Array]]:
            step = self._step_program(cache, ids, rows)
            views, tokens, logits = step(self._model.leaves, ids, views, rows)
            return views, (tokens, logits)

        return cache.step(run)

    def compile_step(self, cache: InplaceKVCache, rows: Rows) -> None:
        """Compiles what decoding needs first: the step, its next larger form on a thread, and the eviction."""
        cache.prepare_step()
        ids = jax.ShapeDtypeStruct((cache.batch,), jnp.int32)
        self._step_program(cache, ids, rows)
        cache.compile_evict()

    def _step_program(self, cache: InplaceKVCache, ids: Any, rows: Rows) -> Any:
        turns, schedule = cache.num_turns, cache.policy.schedule
        fn = functools.partial(_decode_step, model=self._model, schedule=schedule)
        key = ("step", cache.spec, cache.batch, cache.slots_per_chunk, schedule, type(rows))
        args = (self._model.leaves, ids, cache.views, rows)
        program = cache.compiled.get((*key, turns), fn, args, donate=(2,))
        if turns < cache.most_turns and 4 * cache.num_chunks >= 3 * turns:
            more = turn_bucket(turns + 1)
            if (*key, more) not in cache.compiled:
                owner: Any = jax.ShapeDtypeStruct((more, cache.slots_per_chunk), jnp.int32)
                shared = cache.views.shared._replace(owner=owner)
                args = (*args[:2], dataclasses.replace(cache.views, shared=shared), rows)
                cache.compiled.prepare((*key, more), fn, args, donate=(2,))
        return program

    # --- prefill ----------------------------------------------------------------------------------------------------

    def prefill(
        self,
        cache: InplaceKVCache,
        row: int,
        ids: list[int],
        report: Callable[[int], None] | None = None,
        watch: Callable[[int, jax.Array], None] | None = None,
    ) -> jax.Array:
        """Runs a prompt through all layers and writes its entries home; returns the last layer's output.

        Args:
            cache: the cache.
            row: an empty row of it.
            ids: the prompt.
            report: told how many layers are dispatched, after each.
            watch: shown what comes out of the embedding (0) and of each layer (1, 2, ...): [T, M].

        Returns:
            [T, M]: T is the prompt's length rounded up to a bucket; rows beyond the prompt are padding.
        """
        cache.begin_prompt(row, len(ids))
        padded = cache.block * turn_bucket(-(-len(ids) // cache.block))
        # Padding repeats the prompt: a masked product with a NaN, which another token may have, would still be NaN.
        x = self._embed(cache, jnp.array(ids + ids[-1:] * (padded - len(ids)), jnp.int32))
        if watch is not None:
            watch(0, x)
        index, length = jnp.int32(row), jnp.int32(len(ids))
        for i in range(self.num_layers):
            x = cache.write_prompt(
                row, (i,), functools.partial(self._prefill_layer, i, x, index, length, cache)
            )
            if report is not None:
                report(i + 1)
            if watch is not None:
                watch(i + 1, x)
        cache.end_prompt(row)
        return x

    def _prefill_layer(
        self,
        i: int,
        x: jax.Array,
        row: jax.Array,
        length: jax.Array,
        cache: InplaceKVCache,
        views: Views,
    ) -> tuple[Views, jax.Array]:
        layer = self._layers[i]
        # The plan names the layer, so layers of one kind share a program.
        key = (
            "prefill",
            self._kinds[i],
            views.spec,
            cache.batch,
            x.shape,
            views.shared.slots.shape,
            views.shared.owner.shape,
        )
        fn = functools.partial(_prefill_layer, layer=layer)
        args = (layer.leaves, x, views[i], row, length)
        view, x = cache.compiled.call(key, fn, args, donate=(1, 2))
        return views.put(i, view), x

    def _embed(self, cache: InplaceKVCache, ids: jax.Array) -> jax.Array:
        fn = functools.partial(_embed, model=self._model)
        x: jax.Array = cache.compiled.call(("embed", ids.shape), fn, (self._model.leaves, ids))
        return x

    def logits(self, cache: InplaceKVCache, x: jax.Array) -> jax.Array:
        """Float32 logits [N, vocabulary] of the last layer's output [N, M]."""
        fn = functools.partial(_logits, model=self._model)
        out: jax.Array = cache.compiled.call(("logits", x.shape), fn, (self._model.leaves, x))
        return out

    def sample(
        self, cache: InplaceKVCache, logits: jax.Array, rows: Rows, positions: jax.Array
    ) -> jax.Array:
        """Next token of each row from its logits [B, vocabulary], at positions int32 [B]; NO_TOKEN as in `step`."""
        key = ("sample", logits.shape, type(rows))
        out: jax.Array = cache.compiled.call(key, _sample, (logits, rows, positions))
        return out


def _sample(logits: jax.Array, rows: Rows, positions: jax.Array) -> jax.Array:
    # Single tokens may have -inf; the largest logit of a model that works is a number.
    is_good = jnp.isfinite(jnp.max(logits, axis=-1))
    return jnp.where(is_good, sample(logits, rows, positions), NO_TOKEN)


def _decode_step(
    leaves: Leaves,
    ids: jax.Array,
    views: Views,
    rows: Rows,
    *,
    model: Split,
    schedule: Schedule,
) -> tuple[Views, jax.Array, jax.Array]:
    logits, views = schedule(model.join(leaves), ids, views)
    return views, _sample(logits, rows, views.positions), logits


def _prefill_layer(
    leaves: Leaves, x: jax.Array, view: View, row: jax.Array, length: jax.Array, *, layer: Split
) -> tuple[View, jax.Array]:
    module = layer.join(leaves)
    view = view.begin()
    positions = jnp.arange(x.shape[0], dtype=jnp.int32)
    new = module.project_prompt(x, positions, None)
    o, view = attend_prompt(
        new.q,
        new.entries[0],
        view,
        row=row,
        length=length,
        scale=module.scale,
        attended=new.attended,
    )
    return view, module.finish_prompt(x, o, positions < length)


def _embed(leaves: Leaves, ids: jax.Array, *, model: Split) -> jax.Array:
    x: jax.Array = model.join(leaves).embed(ids)
    return x


def _logits(leaves: Leaves, x: jax.Array, *, model: Split) -> jax.Array:
    out: jax.Array = model.join(leaves).logits(x)
    return out
