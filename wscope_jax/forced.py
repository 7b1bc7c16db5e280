"""Texts that are given, not sampled: their logits, and where a model's numbers stop being finite."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wscope_jax.cache import InplaceKVCache
from wscope_jax.programs import ModelPrograms
from wscope_jax.progress import Progress
from wscope_jax.sampling import Sampling, row_operands

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


def score(
    programs: ModelPrograms,
    cache: InplaceKVCache,
    ids_BT: Int32s,
    prefill: int,
    progress: Progress,
) -> Float32s:
    """Prefills ids[:, :prefill] and decodes the rest token by token.

    Args:
        programs: of the model.
        cache: an empty one with B rows.
        ids_BT: the texts.
        prefill: P, 1 to T.
        progress: told how far the prefills are.

    Returns:
        [B, T - P + 1, vocabulary]: of positions P - 1 to T - 1.
    """
    batch, num_tokens = ids_BT.shape
    rows = row_operands([Sampling()] * batch)
    first = []
    for row in range(batch):

        def report(layers: int, row: int = row) -> None:
            done = row * prefill + prefill * layers // programs.num_layers
            progress.prefilling(done, batch * prefill)

        x = programs.prefill(cache, row, ids_BT[row, :prefill].tolist(), report)
        first.append(np.asarray(programs.logits(cache, x[prefill - 1 : prefill]))[0])
    steps = [np.stack(first)]
    for t in range(prefill, num_tokens):
        _, logits = programs.step(cache, jnp.array(ids_BT[:, t]), rows)
        steps.append(np.asarray(logits))
    return np.stack(steps, axis=1)


def read(programs: ModelPrograms, cache: InplaceKVCache, ids: list[int]) -> Float32s:
    """Logits [T, vocabulary] of every position of one text, by the prefill path, over an empty cache."""
    x = programs.prefill(cache, 0, ids)
    return np.asarray(programs.logits(cache, x))[: len(ids)]


def find_broken(programs: ModelPrograms, cache: InplaceKVCache, ids: Sequence[int]) -> str | None:
    """Where numbers stop being finite as the model reads `ids`: "the embedding", "layer 3", "the head"."""
    places: list[str] = []

    def watch(done: int, x: jax.Array) -> None:
        if not places and not bool(jnp.isfinite(x[: len(ids)]).all()):
            places.append(f"layer {done - 1}" if done else "the embedding")

    x = programs.prefill(cache, 0, list(ids), watch=watch)
    logits = programs.logits(cache, x)[: len(ids)]
    if not places and not bool(jnp.isfinite(logits.max(-1)).all()):
        places.append("the head")
    return places[0] if places else None
