"""What the engine's programs ask of XLA: full precision of every product, and no buffer donated twice."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.engines import ALL_POLICIES, CHECKPOINTS, FAMILIES, engine
from tests.lowering import target
from wscope_jax import Sampling, programs
from wscope_jax.cache import InplaceKVCache
from wscope_jax.experts import DENSE_TOKENS, GATHER_TOKENS
from wscope_jax.models import registry
from wscope_jax.sampling import row_operands

POLICY = ALL_POLICIES["share_0.5"]  # attends in all regions
PROMPT = list(range(1, 70))

# Every kind of product, by its einsum.
LINEAR = {"linear": "ni,oi->no", "router": "nm,em->ne"}
FEW_TOKENS = {"expert_up": "m,xfm->xf", "expert_down": "xf,xmf->xm", "expert_sum": "x,xm->m"}
DENSE = {"expert_up": "nm,efm->nef", "expert_down": "nef,emf->enm"}
TILED = {"expert_up": "tm,fm->tf", "expert_down": "tf,mf->tm"}
PROMPT_ATTENTION = {"scores": "ghck,gsk->ghcs", "values": "ghcs,gsv->ghcv"}
# In decode W_uk stands before latent attention and W_uv behind it; a prompt makes them part of its keys and values.
LATENT = {"key_up": "hnp,hpr->hnr", "value_up": "hnr,hvr->hnv"}
ATTENTION = {
    "scores": "bghk,bgsk->bghs",
    "values": "bghs,bgsv->bghv",
    "join": "cbh,chv->bhv",
}


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


def _products(fn: Any, args: tuple[Any, ...], platform: str) -> list[tuple[str, str]]:
    """(einsum, its line of StableHLO) of every dot_general of a program, as it is lowered for a platform."""
    with target(platform):
        lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,))
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


def _check(fn: Any, args: tuple[Any, ...], platform: str, *kinds: dict[str, str]) -> None:
    products = _products(fn, args, platform)
    for einsum, line in products:
        assert "precision = [HIGHEST, HIGHEST]" in line, f"{einsum}: {line}"
    assert {einsum for einsum, _ in products} == {e for kind in kinds for e in kind.values()}


@pytest.mark.parametrize(
    ("platform", "batch", "experts"),
    [
        ("cpu", 2, TILED),
        ("cuda", GATHER_TOKENS, FEW_TOKENS),
        ("cuda", GATHER_TOKENS + 1, DENSE),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_a_decode_step_is_exact(
    family: str, dtype: str, platform: str, batch: int, experts: dict[str, str]
) -> None:
    model = _model(family, dtype)
    split = programs.Split.of(model)
    step = functools.partial(programs._decode_step, model=split, schedule=POLICY.schedule)
    with _cache(model, dtype, batch) as cache:
        assert cache.spec.uses_host
        assert cache.spec.uses_link
        ids, rows = jnp.zeros(batch, jnp.int32), row_operands([Sampling()] * batch)
        args = (split.leaves, ids, cache.views, rows)
        # The products of the GPU's own kernels are not XLA's: tests/ops/test_pallas.py looks at them.
        attention = ATTENTION if platform == "cpu" else {}
        latent = LATENT if family == "deepseek_v2" else {}
        _check(step, args, platform, LINEAR, attention, latent, experts)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_a_prefill_is_exact(family: str, dtype: str, platform: str) -> None:
    model = _model(family, dtype)
    last = model.num_layers - 1  # has experts in every family
    layer, whole = programs.Split.of(model.layers[last]), programs.Split.of(model)
    num_tokens = 32 * (DENSE_TOKENS // 32 + 1)
    x = jnp.zeros((num_tokens, model.config.hidden_size), jnp.dtype(dtype))
    with _cache(model, dtype, 2) as cache:
        args = (layer.leaves, x, cache.views[last], jnp.int32(0), jnp.int32(60))
        fn = functools.partial(programs._prefill_layer, layer=layer)
        _check(fn, args, platform, LINEAR, PROMPT_ATTENTION, TILED)
    logits = functools.partial(programs._logits, model=whole)
    _check(logits, (whole.leaves, x[:1]), platform, {"linear": LINEAR["linear"]})


# --- donation --------------------------------------------------------------------------------------


def _assert_apart(views: Any) -> None:
    leaves = jax.block_until_ready(jax.tree.leaves(views))
    assert len({id(x) for x in leaves}) == len(leaves)
    places = [x.unsafe_buffer_pointer() for x in leaves if x.size > 0]
    assert len(set(places)) == len(places) > 0


@pytest.fixture(params=["share_0.5", "resident"])
def generation(request: pytest.FixtureRequest) -> Iterator[Any]:
    eng = engine()
    eng.policy = ALL_POLICIES[request.param]
    with eng.stream([PROMPT, PROMPT[:40]], Sampling(max_new_tokens=400, ignore_eos=True)) as stream:
        yield stream


def test_no_buffer_is_donated_twice(generation: Any) -> None:
    _assert_apart(generation._cache.views)  # as they were made
    cache, placed = generation._cache, []
    for number in range(700):
        next(generation)
        if number % 9 == 0:
            _assert_apart(cache.prepare_step())
            placed.append(len(cache.placement.rows[0].slots))
        is_past_eviction = len(placed) > 1 and placed[-1] > placed[1] > 0
        if is_past_eviction or (number == 90 and not cache.spec.has_calls):
            break
    assert is_past_eviction or not cache.spec.has_calls
