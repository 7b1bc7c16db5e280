"""DeepSeek-V2 in both forms of its attention, and every option of the larger model, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engines import ALL_POLICIES, CHECKPOINTS, golden
from tests.models import dense
from tests.oracle_latent import LatentOracle
from tests.tiny import write_checkpoint
from wscope_jax import Engine, Sampling, models
from wscope_jax.layout import EntryLayout

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
LARGE = {  # what the larger model has and V2-Lite has not
    "q_lora_rank": 20,
    "topk_method": "group_limited_greedy",
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.7,
}
SHAPES = {
    "lite": {},
    "low_rank_queries": {"q_lora_rank": 20},
    "large": LARGE,
    "all_groups": LARGE | {"topk_group": 4},
    "one_group": LARGE | {"topk_group": 1, "num_experts_per_tok": 3},
    "groups_without_a_limit": {"n_group": 4, "topk_group": 2},  # greedy does not look at them
    "scaled_experts": {"routed_scaling_factor": 16.0},
    "one_shared_expert": {"n_shared_experts": 1},
    "no_shared_expert": {"n_shared_experts": 0},
    "shared_null": {"n_shared_experts": None},
    "all_layers_sparse": {"first_k_dense_replace": 0},
    "all_layers_dense": {"first_k_dense_replace": 3},
    "two_dense_layers": {"first_k_dense_replace": 2},
    "biases": {"attention_bias": True, "q_lora_rank": 20},
    "biases_without_low_rank": {"attention_bias": True},
    "wide_heads": {"qk_nope_head_dim": 24, "v_head_dim": 20},  # the absorbed form costs less
    "value_as_wide_as_the_latent": {"v_head_dim": 16},
    "one_head": {"num_attention_heads": 1, "num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "fused_experts": {"fused": True},
    "three_shards_float32": {"dtype": "float32", "shards": 3},
    "old_theta": {"rope_parameters": ..., "rope_theta": 500},
    "default_theta": {"rope_parameters": ...},
    "yarn": {"rope_parameters": YARN},
    "yarn_scaled": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "yarn_amplitude": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.4}},
    "yarn_factor": {
        "rope_parameters": YARN | {"mscale": 1, "mscale_all_dim": 0.4, "attention_factor": 0.9}
    },
    "linear_scaled": {
        "rope_parameters": ...,
        "rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 0.6},
    },
}
# Seeds with which no expert hangs on the rounding, where 0 is none.
SEEDS: dict[str, int] = {}


@pytest.fixture(scope="module")
def lite():
    return models.load(CHECKPOINTS["deepseek_v2"], "float32")


def write(tmp_path, name, **changes):
    keys = {"seed": SEEDS.get(name, 0)} | SHAPES[name] | changes
    return write_checkpoint(tmp_path, "deepseek_v2", **keys)


@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_equal_the_oracle_in_every_shape(name, tmp_path):
    oracle = LatentOracle(write(tmp_path / "plain", name, fused=False))
    ids = np.random.default_rng(3).integers(0, 128, (1, 80))
    expected = oracle.logits(ids)
    assert oracle.router_gap > 2e-6, "choose another seed: an expert hangs on the rounding"
    model = models.load(write(tmp_path / "model", name), "float32")
    for forward in (dense.forward, dense.forward_prompt):
        got = dense.logits(model, ids, forward)
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_oracle_gives_the_golden_logits():
    values, oracle = golden("deepseek_v2"), LatentOracle(CHECKPOINTS["deepseek_v2"])
    np.testing.assert_allclose(oracle.logits(values.ids), values.logits, atol=1e-4, rtol=0)
    steps = oracle.logits(values.seq)[:, values.ids.shape[1] - 1 : -1]
    np.testing.assert_allclose(steps, values.step_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("forward", [dense.forward, dense.forward_prompt])
def test_both_forms_give_the_golden_logits(lite, forward):
    values = golden("deepseek_v2")
    got = dense.logits(lite, values.ids, forward)
    np.testing.assert_allclose(got, values.logits, atol=1e-4, rtol=0)
    got = dense.logits(lite, values.long_ids[None], forward)[0, values.long_first - 1 :]
    np.testing.assert_allclose(got, values.long_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("forward", [dense.forward, dense.forward_prompt])
def test_bfloat16_stays_near_the_golden_logits(forward):
    values, model = golden("deepseek_v2"), models.load(CHECKPOINTS["deepseek_v2"])
    # Where rounding sends a token to another expert the logits are far off: look at the median.
    gap = np.abs(dense.logits(model, values.ids, forward) - values.logits).max(axis=-1)
    assert np.median(gap) < 0.1


def test_one_layer_in_both_forms(lite):
    """Without the layers behind it, in which the smallest difference may choose another expert."""
    layer, pos = lite.layers[1], jnp.arange(50, dtype=jnp.int32)
    x = lite.embed(jnp.asarray(golden("deepseek_v2").long_ids[:50]))
    new, expanded = layer.project(x, pos), layer.project_prompt(x, pos)
    assert expanded.attended is not None
    np.testing.assert_array_equal(new.entries[0].key, expanded.entries[0].key)
    o = dense.attend_all(new.q, new.entries[0], layer.scale, 32)
    o_expanded = dense.attend_all(expanded.q, expanded.attended, layer.scale)
    assert (o.shape, o_expanded.shape) == ((50, 4, 32), (50, 4, 16))
    got = layer.finish_prompt(x, o_expanded)
    np.testing.assert_allclose(layer.finish(x, o), got, atol=1e-5, rtol=0)
    np.testing.assert_allclose(layer.query(x, pos), new.q, atol=1e-6, rtol=0)


def test_the_form_of_a_prompt_is_the_cheaper_one(tmp_path):
    """By the count of operations, and as the engine runs it."""
    for name, is_expanded in {"lite": True, "wide_heads": False}.items():
        model = models.load(write(tmp_path / name, name))
        absorbed, expanded = model.config.prompt_flops(100)
        assert (expanded < absorbed) == is_expanded
        x, pos = jnp.zeros((100, 32), jnp.bfloat16), jnp.arange(100, dtype=jnp.int32)
        projection = jax.eval_shape(model.layers[0].project_prompt, x, pos)
        assert (projection.attended is not None) == is_expanded
    # One head, two tokens: three pairs.
    absorbed, expanded = models.read_config(write(tmp_path / "one", "one_head")).prompt_flops(2)
    assert absorbed == 2 * (3 * (16 + 8 + 16) + 2 * 16 * (12 + 10))
    assert expanded == 2 * (3 * (12 + 8 + 10) + 2 * 16 * (12 + 10))


@pytest.mark.parametrize("name", ["large", "wide_heads"])
def test_engine_gives_the_oracles_logits_and_tokens(name, tmp_path):
    """A prompt in either form and steps across evictions, in all regions."""
    directory = write(tmp_path / "model", name, num_hidden_layers=2)
    ids = np.random.default_rng(5).integers(0, 128, (1, 200))
    oracle = LatentOracle(directory)
    expected = oracle.logits(ids)[0]
    assert oracle.router_gap > 2e-6, "choose another seed: an expert hangs on the rounding"
    with Engine.from_pretrained(directory, dtype="float32", window=32, threads=2) as engine:
        engine.policy = ALL_POLICIES["share_0.5"]
        np.testing.assert_allclose(engine.logits(ids)[0], expected, atol=1e-4, rtol=0)
        scored = engine.score(ids[0], 100)
        np.testing.assert_allclose(scored, expected[99:], atol=1e-4, rtol=0)
        prompts = [ids[0, :n].tolist() for n in (7, 70, 100)]
        tokens = {}
        for policy in ("share_0.5", "resident"):
            engine.policy = ALL_POLICIES[policy]
            how = Sampling(max_new_tokens=40, ignore_eos=True)
            tokens[policy] = engine.generate(prompts, how).tokens
        assert tokens["share_0.5"] == tokens["resident"]


def test_what_is_stored_of_a_token(lite):
    assert {stream.layout for (stream,) in lite.streams} == {
        EntryLayout(num_kv_heads=1, key_dim=40, value_dim=32, value_in_key=True)
    }
    assert [lite.layer_kind(i) for i in range(3)] == ["dense", "sparse", "sparse"]


def test_scale_of_the_released_model():
    """Source: config.json of DeepSeek-V2-Lite; 192^-0.5 * (0.1 * 0.707 * ln 40 + 1)^2."""
    from wscope_jax import configurations
    from wscope_jax.checkpoint import read_json
    from wscope_jax.models.deepseek_v2 import read_config
    from wscope_jax.models.fields import Fields

    path = configurations._folder() / "deepseek-v2-lite.json"
    config = read_config(Fields(read_json(path), path), Fields({}, path))
    assert config.softmax_scale == pytest.approx(0.1147214, abs=1e-7)
    assert (config.rope.amplitude, config.rope.is_adjacent) == (1.0, True)
    flops = config.prompt_flops(8192)
    assert flops.absorbed / flops.expanded == pytest.approx(3.2, abs=0.1)
