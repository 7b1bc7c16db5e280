"""Models against golden logits of the published implementations, and against the oracle in every shape."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wscope_jax
from tests.models import dense
from tests.oracle import Oracle
from tests.tiny import write_checkpoint
from wscope_jax import models
from wscope_jax.errors import UsageError
from wscope_jax.models import drawing

GOLDEN = Path(__file__).parents[1] / "golden"
ASSETS = Path(wscope_jax.__file__).parent / "assets"
CHECKPOINTS = {
    "qwen3_moe": ASSETS / "tiny_qwen3_moe",
    "mixtral": GOLDEN / "mixtral",
}
# Only what the published configuration classes allow; each was compared with the published code once.
SHAPES = {
    "one_kv_head_per_head": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
    "six_heads_per_kv_head": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "seed": 1,
    },
    "no_head_dim": {"head_dim": ...},
    "weights_as_they_are": {"norm_topk_prob": False, "num_experts_per_tok": 5},
    "some_dense_layers": {"mlp_only_layers": [1], "num_hidden_layers": 3},
    "every_second_sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "no_experts": {"num_experts": 0},
    "all_experts": {"num_experts": 4, "num_experts_per_tok": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "three_shards_float32": {"dtype": "float32", "shards": 3},
    "fused_experts": {"fused": True},
    "long_window": {"use_sliding_window": True, "sliding_window": 4096},
    "old_theta": {"rope_parameters": ..., "rope_theta": 5000},
    "default_theta": {"rope_parameters": ...},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e4},
    "yarn": {
        "rope_parameters": ...,
        "rope_theta": 1e5,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn_with_everything": {
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": None,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    },
    "yarn_amplitude": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "attention_factor": 0.8,
        },
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": {"family": "mixtral"},
    "mixtral_fused": {"family": "mixtral", "fused": True, "shards": 2},
    "mixtral_one_expert": {"family": "mixtral", "num_experts_per_tok": 1, "num_local_experts": 5},
    "mixtral_kv_heads_null": {"family": "mixtral", "num_key_value_heads": None, "head_dim": None},
    "mixtral_tied": {"family": "mixtral", "tie_word_embeddings": True},
    "mixtral_always_normalises": {"family": "mixtral", "norm_topk_prob": False},
    "mixtral_default_theta": {"family": "mixtral", "rope_parameters": ...},
}


def golden(family):
    return np.load(GOLDEN / family / "golden.npz")


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_oracle_gives_the_golden_logits(family):
    values, oracle = golden(family), Oracle(CHECKPOINTS[family])
    np.testing.assert_allclose(oracle.logits(values["ids"]), values["logits"], atol=1e-4, rtol=0)
    steps = oracle.logits(values["seq"])[:, values["ids"].shape[1] - 1 : -1]
    np.testing.assert_allclose(steps, values["step_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_model_gives_the_golden_logits(family):
    values, model = golden(family), models.load(CHECKPOINTS[family], "float32")
    got = dense.logits(model, values["ids"])
    np.testing.assert_allclose(got, values["logits"], atol=1e-4, rtol=0)
    got = dense.logits(model, values["long_ids"])[0, int(values["long_first"]) - 1 :]
    np.testing.assert_allclose(got, values["long_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_bfloat16_stays_near_the_golden_logits(family):
    values, model = golden(family), models.load(CHECKPOINTS[family])
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    # Where rounding sends a token to another expert the logits are far off: look at the median.
    gap = np.abs(dense.logits(model, values["ids"]) - values["logits"]).max(axis=-1)
    assert np.median(gap) < 0.1


@pytest.mark.parametrize("name", SHAPES)
def test_model_equals_the_oracle_in_every_shape(name, tmp_path):
    directory = write_checkpoint(tmp_path / "model", **SHAPES[name])
    oracle = Oracle(write_checkpoint(tmp_path / "plain", **SHAPES[name] | {"fused": False}))
    ids = np.random.default_rng(3).integers(0, 128, (1, 80))
    expected = oracle.logits(ids)
    assert oracle.router_gap > 2e-6, "choose another seed: an expert hangs on the rounding"
    got = dense.logits(models.load(directory, "float32"), ids)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_both_embeddings_count_where_both_are_stored(tmp_path):
    """As in the published code: a stored head is used, whatever the configuration says."""
    directory = write_checkpoint(tmp_path / "model")
    config = (directory / "config.json").read_text()
    tied = config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    assert tied != config
    (directory / "config.json").write_text(tied)
    model = models.load(directory, "float32")
    assert model.head is not None
    ids = np.arange(20)[None]
    got, expected = dense.logits(model, ids), Oracle(directory).logits(ids)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_layers_of_one_kind_share_their_graph(tmp_path):
    directory = write_checkpoint(tmp_path / "model", num_hidden_layers=4, mlp_only_layers=[1, 3])
    model = models.load(directory)
    graphs = [nnx.split(layer)[0] for layer in model.layers]
    assert [model.layer_kind(i) for i in range(4)] == ["sparse", "dense", "sparse", "dense"]
    assert graphs[0] == graphs[2] != graphs[1] == graphs[3]
    assert hash(graphs[0]) == hash(graphs[2])
    shapes = [jax.tree.map(jnp.shape, nnx.state(layer)) for layer in model.layers]
    assert shapes[0] == shapes[2]


def test_tokens_do_not_depend_on_their_neighbours():
    """One token alone, in a batch, and beside tokens that are not valid."""
    model = models.load(CHECKPOINTS["qwen3_moe"], "float32")
    ids, pos = jnp.asarray([5, 9, 77], jnp.int32), jnp.asarray([3, 100, 4000], jnp.int32)
    x = model.embed(ids)
    q, (entries,), carry, attended = model.project(1, x, pos)
    assert carry is attended is None
    o = jnp.cos(q)
    alone = model.project(1, x[1:2], pos[1:2])
    np.testing.assert_allclose(alone.q, q[1:2], atol=1e-5)
    np.testing.assert_allclose(alone.entries[0].key, entries.key[1:2], atol=1e-5)
    np.testing.assert_allclose(model.query(1, x, pos), q, atol=1e-6)
    together = model.finish(1, x, o)
    np.testing.assert_allclose(model.finish(1, x[1:2], o[1:2]), together[1:2], atol=1e-5)
    bad = x.at[0].set(jnp.nan)
    masked = model.finish(1, bad, o, jnp.asarray([False, True, True]))
    np.testing.assert_allclose(masked[1:], together[1:], atol=1e-5)


def test_streams_and_scale_follow_the_configuration(tmp_path):
    model = models.load(write_checkpoint(tmp_path / "model", num_key_value_heads=4, head_dim=8))
    (stream,) = model.streams[1]
    assert (stream.layout.num_kv_heads, stream.layout.key_dim, stream.layout.value_dim) == (4, 8, 8)
    assert model.scale(0) == 8**-0.5
    assert (model.num_layers, model.vocab_size, len(model.streams)) == (2, 128, 2)


def test_abstract_model_has_the_shapes_and_no_arrays():
    config = models.read_config(CHECKPOINTS["mixtral"])
    model = models.abstract(config, "bfloat16")
    loaded = models.load(CHECKPOINTS["mixtral"])
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert [leaf.shape for leaf in leaves] == [
        leaf.shape for leaf in jax.tree.leaves(nnx.state(loaded))
    ]
    assert model.streams == loaded.streams


def test_random_model_runs_and_repeats():
    config = models.read_config(CHECKPOINTS["qwen3_moe"])
    first, again, other = (models.random(config, seed, "float32") for seed in (1, 1, 2))
    ids = np.arange(12)[None]
    got = dense.logits(first, ids)
    assert np.isfinite(got).all()
    assert got.std() > 0.1
    np.testing.assert_array_equal(got, dense.logits(again, ids))
    assert np.abs(got - dense.logits(other, ids)).max() > 0.1


def test_random_weights_need_little_beside_themselves():
    """A parameter is drawn in pieces, on a GPU in place; no piece is another one's copy."""
    leaf = jax.ShapeDtypeStruct((drawing.DRAWN // 512 + 100, 1, 1024), jnp.float32)
    key, piece = jax.random.key(1), drawing.DRAWN // 1024
    drawn = drawing.draw(key, leaf)
    assert abs(np.std(drawn) * 32 - 1) < 1e-2
    assert len(np.unique(drawn[:, 0, 0])) > 0.99 * len(drawn)
    in_place = jnp.zeros(leaf.shape, leaf.dtype)  # as on a GPU
    for start in range(0, len(drawn), piece):
        size = min(piece, len(drawn) - start)
        in_place = drawing._draw_into(in_place, key, jnp.int32(start), (size, 1, 1024))
    np.testing.assert_array_equal(in_place, drawn)
    large = jax.ShapeDtypeStruct((1 << 20, 1, 1024), jnp.float32)
    program = drawing._draw_into.lower(large, key, jnp.int32(0), (piece, 1, 1024)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 32 * drawing.DRAWN


def test_unknown_dtype_is_refused():
    with pytest.raises(
        UsageError, match="'int8' is not supported; choose one of bfloat16, float32"
    ):
        models.load(CHECKPOINTS["mixtral"], "int8")


def test_every_product_has_full_precision():
    """On a GPU a product without it would be TF32 even where float32 was asked for."""
    model = models.load(CHECKPOINTS["qwen3_moe"], "float32")
    ids = jnp.zeros(3, jnp.int32)
    text = jax.jit(lambda ids: dense.forward(model, ids)).lower(ids).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) > 20
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
