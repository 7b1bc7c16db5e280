"""What the engine's programs ask of XLA: full precision of every product, and donated buffers that are all different."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.engines import ALL_POLICIES, CHECKPOINTS, FAMILIES, engine
from wscope_jax import Sampling, programs
from wscope_jax.cache import InplaceKVCache
from wscope_jax.models import registry
from wscope_jax.sampling import row_operands

POLICY = ALL_POLICIES["share_0.5"]  # attends in all regions
PROMPT = list(range(1, 70))

# Every kind of product, by its einsum.
LINEAR = {"linear": "ni,oi->no", "router": "nm,em->ne"}
ONE_TOKEN = {"expert_up": "m,xfm->xf", "expert_down": "xf,xmf->xm", "expert_sum": "x,xm->m"}
SORTED = {"expert_up": "tm,fm->tf", "expert_down": "tf,mf->tm"}
PROMPT_ATTENTION = {"scores": "ghck,gsk->ghcs", "values": "ghcs,gsv->ghcv"}
ATTENTION = {"scores": "bghk,bgsk->bghs", "values": "bghs,bgsv->bghv", "join": "cbh,chv->bhv"}


@functools.cache
def _model(family: str, dtype: str) -> Any:
    return registry.load(CHECKPOINTS[family], dtype)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def _cache(model: Any, dtype: str, batch: int) -> InplaceKVCache:
    return InplaceKVCache(
        model.streams, policy=POLICY, batch=batch, max_len=200, window=32, dtype=dtype
    )


def _products(lowered: Any) -> list[tuple[str, str]]:
    """(einsum, its line of StableHLO) of every dot_general."""
    text = lowered.as_text(debug_info=True)
    assert not re.search(r"stablehlo\.(dot|convolution) |ragged_dot|gemm", text)
    names = dict(re.findall(r'^(#loc\d+) = loc\("(.*?)"', text, re.MULTILINE))
    found = []
    for line in text.splitlines():
        if "stablehlo.dot_general" in line:
            (place,) = re.findall(r"loc\((#loc\d+)\)", line)
            path = names[place].split("/")
            assert path[-1] == "dot_general"
            found.append((path[-2] if len(path) > 1 else "", line))
    return found


def _check(lowered: Any, *kinds: dict[str, str]) -> None:
    products = _products(lowered)
    for einsum, line in products:
        assert "precision = [HIGHEST, HIGHEST]" in line, f"{einsum}: {line}"
    assert {einsum for einsum, _ in products} == {e for kind in kinds for e in kind.values()}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_a_decode_step_is_exact(family: str, dtype: str, batch: int) -> None:
    model = _model(family, dtype)
    split = programs.Split.of(model)
    step = functools.partial(programs._decode_step, model=split, schedule=POLICY.schedule)
    with _cache(model, dtype, batch) as cache:
        assert cache.spec.uses_host
        assert cache.spec.uses_link
        rows = row_operands([Sampling()] * batch)
        lowered = jax.jit(step, donate_argnums=2).lower(
            split.leaves, jnp.zeros(batch, jnp.int32), cache.views, rows
        )
        _check(lowered, LINEAR, ATTENTION, ONE_TOKEN if batch == 1 else SORTED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_a_prefill_is_exact(family: str, dtype: str) -> None:
    model = _model(family, dtype)
    layer, whole = programs.Split.of(model.layers[0]), programs.Split.of(model)
    x = jnp.zeros((64, model.config.hidden_size), jnp.dtype(dtype))
    with _cache(model, dtype, 2) as cache:
        args = (layer.leaves, x, cache.views[0], jnp.int32(0), jnp.int32(60))
        fn = functools.partial(programs._prefill_layer, layer=layer)
        _check(jax.jit(fn, donate_argnums=(1, 2)).lower(*args), LINEAR, PROMPT_ATTENTION, SORTED)
    logits = jax.jit(functools.partial(programs._logits, model=whole))
    _check(logits.lower(whole.leaves, x[:1]), {"linear": LINEAR["linear"]})


# --- donation --------------------------------------------------------------------------------------


def _assert_apart(views: Any) -> None:
    leaves = jax.block_until_ready(jax.tree.leaves(views))
    assert len({id(x) for x in leaves}) == len(leaves)
    places = [x.unsafe_buffer_pointer() for x in leaves if x.size > 0]
    assert len(set(places)) == len(places) > 0


@pytest.fixture(params=["share_0.5", "gpu_only", "cpu_only", "resident"])
def generation(request: pytest.FixtureRequest) -> Iterator[Any]:
    eng = engine()
    eng.policy = ALL_POLICIES[request.param]
    with eng.stream([PROMPT, PROMPT[:40]], Sampling(max_new_tokens=60, ignore_eos=True)) as stream:
        yield stream


def test_no_buffer_is_donated_twice(generation: Any) -> None:
    _assert_apart(generation._cache.views)  # as they were made
    for number in range(100):  # beyond the first evictions
        next(generation)
        if number % 11 == 0:
            _assert_apart(generation._cache.prepare_step())
