"""The plainest way through a model: all tokens at once, attention over all pairs, no cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def forward(model, ids):
    """Logits [T, vocabulary] of one sequence of ids [T]."""
    x = model.embed(ids)
    pos = jnp.arange(ids.shape[0], dtype=jnp.int32)
    for i in range(model.num_layers):
        q, (entries,), *_ = model.project(i, x, pos, None)
        (stream,) = model.streams[i]
        o = attend_all(q, entries, model.scale(i), stream.layout.value_dim)
        x = model.finish(i, x, o)
    return model.logits(x)


def forward_prompt(model, ids):
    """The same in the form that a prompt takes, which may have keys and values of its own."""
    x = model.embed(ids)
    pos = jnp.arange(ids.shape[0], dtype=jnp.int32)
    for layer in model.layers:
        new = layer.project_prompt(x, pos)
        (stream,) = layer.streams
        attended = new.entries[0] if new.attended is None else new.attended
        o = attend_all(new.q, attended, layer.scale, stream.layout.value_dim)
        x = layer.finish_prompt(x, o)
    return model.logits(x)


def attend_all(q, entries, scale, value_dim=None):
    num, heads, dim = q.shape
    kv_heads = entries.key.shape[1]
    q_NGRK = q.reshape(num, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    key, value = entries.key, entries.value
    value = key[..., :value_dim] if value is None else value
    k_SGK, v_SGV = (x.astype(jnp.float32) for x in (key, value))
    dot = functools.partial(jnp.einsum, precision="highest")
    scores_GRNS = scale * dot("ngrk,sgk->grns", q_NGRK, k_SGK)
    seen_NS = jnp.tri(num, dtype=bool)
    probs_GRNS = jax.nn.softmax(jnp.where(seen_NS[None, None], scores_GRNS, -jnp.inf), axis=-1)
    return dot("grns,sgv->ngrv", probs_GRNS, v_SGV).reshape(num, heads, -1).astype(q.dtype)


def logits(model, ids, forward=forward):
    """Logits [B, T, vocabulary] of ids [B, T]."""
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, ids: forward(nnx.merge(graphdef, state), ids))
    return np.stack([np.asarray(step(state, jnp.asarray(row, jnp.int32))) for row in ids])
