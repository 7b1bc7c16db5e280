"""The four-region cache inside somebody else's Flax attention: `python examples/own_attention.py`.

Prints how many tokens lie in each region, and how far the output is from attention over everything.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from flax import nnx

import wscope_jax as ws
from wscope_jax.ops.reference import attend_reference

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 8, 2, 64, 320, 100
SCALE = DIM**-0.5


class MyAttention(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.q = nnx.LinearGeneral(width, (HEADS, DIM), rngs=rngs)
        self.k = nnx.LinearGeneral(width, (KV_HEADS, DIM), rngs=rngs)
        self.v = nnx.LinearGeneral(width, (KV_HEADS, DIM), rngs=rngs)

    def __call__(self, x, view, **prompt):
        entries = ws.Entries(self.k(x), self.v(x))
        how = ws.attend_prompt if prompt else ws.attend
        return how(self.q(x), entries, view, scale=SCALE, **prompt)


layer = MyAttention(32, nnx.Rngs(0))
graphdef, state = nnx.split(layer)
x = jax.random.normal(jax.random.key(1), (PROMPT + STEPS, 32))
compiled = functools.partial(jax.jit, compiler_options=ws.COMPILER_OPTIONS)


@compiled
def prefill(state, x, views):
    row, length = jnp.int32(0), jnp.int32(PROMPT)
    o, view = nnx.merge(graphdef, state)(x, views[0].begin(), row=row, length=length)
    return views.put(0, view), o


@compiled
def step(state, x, views):
    views = views.begin()
    o, view = nnx.merge(graphdef, state)(x[None], views[0])
    return views.put(0, view).advance(), o


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="accepted; it takes seconds as it is")
    parser.parse_args()
    streams = [[ws.Stream(ws.EntryLayout(num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM))]]
    policy = ws.policies.WriteScope(share=0.5)
    with ws.InplaceKVCache(
        streams, policy=policy, batch=1, max_len=PROMPT + STEPS, window=64
    ) as cache:
        cache.begin_prompt(0, PROMPT)
        cache.write_prompt(0, [0], lambda views: prefill(state, x[:PROMPT], views))
        cache.end_prompt(0)
        for t in range(PROMPT, PROMPT + STEPS):
            o = cache.step(lambda views, t=t: step(state, x[t], views))
        print({region.value: tokens for region, tokens in cache.row_tokens(0).items()})
        everything = (layer.k(x)[None], layer.v(x)[None], jnp.array([PROMPT + STEPS]))
        dense = attend_reference(layer.q(x[-1:]), *everything, scale=SCALE)
        print("largest difference to dense attention:", float(jnp.abs(o - dense.o).max()))


if __name__ == "__main__":
    main()
