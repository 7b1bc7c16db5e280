"""Every key of DeepSeek-V2's config.json that a published code honours is honoured or refused by name."""

import json

import pytest

from tests.tiny import make_config, write_checkpoint
from wscope_jax import models
from wscope_jax.errors import CheckpointError

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
}


def read(tmp_path, **changes):
    """The configuration of a directory that holds nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(make_config("deepseek_v2", **changes)))
    return models.read_config(tmp_path)


def refusal(tmp_path, **changes):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message
    return message


def test_keys_arrive_where_they_belong(tmp_path):
    changes = {"q_lora_rank": 20, "attention_bias": True, "n_shared_experts": 3}
    config = read(tmp_path, **changes, routed_scaling_factor=16, moe_intermediate_size=7)
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("deepseek_v2", 128, 32)
    assert (config.num_layers, config.num_q_heads, config.q_lora_rank) == (3, 4, 20)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim) == (16, 12, 8)
    assert (config.v_head_dim, config.softmax_scale) == (10, 20**-0.5)
    assert (config.rope.dim, config.rope.theta, config.rope.is_adjacent) == (8, 1e4, True)
    assert (config.num_experts, config.num_experts_per_tok, config.expert_size) == (8, 2, 7)
    assert (config.shared_size, config.dense_size, config.routed_scale) == (21, 48, 16.0)
    assert (config.num_groups, config.top_groups, config.attention_bias) == (1, 1, True)
    assert [config.is_sparse(i) for i in range(3)] == [False, True, True]
    assert hash(config) == hash(
        read(tmp_path, **changes, routed_scaling_factor=16, moe_intermediate_size=7)
    )


def test_absent_keys_take_the_published_defaults(tmp_path):
    keys = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = models.read_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.num_q_heads) == (4096, 32, 32)
    assert (config.q_lora_rank, config.kv_lora_rank) == (1536, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.num_experts, config.expert_size, config.shared_size) == (64, 1407, 2 * 1407)
    assert (config.vocab_size, config.dense_size, config.num_dense_layers) == (102400, 11008, 0)
    assert (config.max_positions, config.rms_norm_eps, config.rope.theta) == (2048, 1e-6, 1e4)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v2"}))
    with pytest.raises(CheckpointError, match="num_experts_per_tok is missing"):
        models.read_config(tmp_path)


def test_null_and_absent_differ_where_they_do_in_the_published_code(tmp_path):
    assert read(tmp_path, q_lora_rank=None).q_lora_rank is None
    assert read(tmp_path, q_lora_rank=...).q_lora_rank == 1536
    assert read(tmp_path, n_shared_experts=None).shared_size == 0
    assert read(tmp_path, n_shared_experts=0).shared_size == 0
    assert read(tmp_path, n_shared_experts=...).shared_size == 48
    for absent in (None, ...):
        assert read(tmp_path, num_key_value_heads=absent).num_q_heads == 4
    dense = read(tmp_path, first_k_dense_replace=3, num_experts_per_tok=None)
    assert not any(map(dense.is_sparse, range(3)))


def test_what_changes_nothing(tmp_path):
    """Keys that published code derives anew, or looks at in training alone, or not at all with this topk_method."""
    plain = read(tmp_path)
    keys = {"head_dim": 64, "qk_head_dim": 1, "aux_loss_alpha": 0.1, "seq_aux": True, "ep_size": 8}
    assert read(tmp_path, **keys, n_group=8, topk_group=3, scoring_func="softmax") == plain
    assert read(tmp_path, num_experts=8, moe_layer_freq=1, mlp_bias=False) == plain


@pytest.mark.parametrize(
    ("mscales", "growth", "amplitude"),
    [
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.260804, 1.0),
        ({"mscale": 1, "mscale_all_dim": 0.707}, 1.260804, 1.368888 / 1.260804),
        ({}, 1.0, 1.368888),
        ({"mscale": 0, "mscale_all_dim": None}, 1.0, 1.368888),
        ({"mscale": 1, "mscale_all_dim": 1, "factor": 0.5}, 1.0, 1.0),
        ({"mscale": 1, "mscale_all_dim": 1, "attention_factor": 2.0}, 1.368888, 2.0),
    ],
)
def test_yarn_scales_the_scores(tmp_path, mscales, growth, amplitude):
    """Source: models/deepseek_v2 of transformers; 1.368888 = 0.1 ln 40 + 1."""
    new = read(tmp_path, rope_parameters=YARN | mscales)
    assert new.softmax_scale == pytest.approx(20**-0.5 * growth**2, rel=1e-5)
    assert new.rope.amplitude == pytest.approx(amplitude, rel=1e-5)
    scaling = {"type": "yarn"} | {k: v for k, v in YARN.items() if "rope" not in k} | mscales
    assert read(tmp_path, rope_parameters=..., rope_theta=1e4, rope_scaling=scaling) == new


LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}


def test_groups_of_experts(tmp_path):
    config = read(tmp_path, **LIMITED)
    assert (config.num_groups, config.top_groups) == (4, 2)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"n_group": None}, "n_group is None; allowed: an integer from 1 to 8"),
        ({"n_group": 3}, "n_group is 3; allowed: a divisor of n_routed_experts, 8"),
        ({"n_group": 0}, "n_group is 0"),
        ({"topk_group": ...}, "topk_group is missing; allowed: an integer from 1 to 4"),
        ({"topk_group": 5}, "topk_group is 5; allowed: an integer from 1 to 4"),
        ({"topk_group": 0}, "topk_group is 0"),
        (
            {"num_experts_per_tok": 5},
            "topk_group is 2; allowed: groups of at least num_experts_per_tok, 5, experts",
        ),
    ],
)
def test_groups_that_are_refused(tmp_path, changes, what):
    assert what in refusal(tmp_path, **LIMITED | changes)


REFUSED = {
    "hidden_size": [0, "x"],
    "num_attention_heads": [0, -4, "4", 4097],
    "num_key_value_heads": [1, 2, 8, "4"],
    "q_lora_rank": [0, -1, 1.5, "none", 1 << 30],
    "kv_lora_rank": [0, -1, "512", 1 << 30],
    "qk_nope_head_dim": [0, -16, True],
    "qk_rope_head_dim": [0, 7, -8, "64"],
    "v_head_dim": [0, -1, [128]],
    "n_routed_experts": [0, -1, 1 << 20, 2.5, "64"],
    "num_experts": [4],
    "n_shared_experts": [-1, 1.0, "2"],
    "num_experts_per_tok": [0, 9, None, "2"],
    "moe_intermediate_size": [0, "a"],
    "intermediate_size": [0, -1],
    "first_k_dense_replace": [-1, 1.0, "1", True],
    "moe_layer_freq": [0, 2, "1"],
    "routed_scaling_factor": [-1.0, 1e9, "16", True],
    "topk_method": ["noaux_tc", "random", 3],
    "scoring_func": ["sigmoid", "sqrtsoftplus", 1],
    "norm_topk_prob": [True, 1, "yes"],
    "attention_bias": [1, "true"],
    "mlp_bias": [True],
    "rope_interleave": [False, 1],
    "rms_norm_eps": [-1e-6, 2],
    "hidden_act": ["gelu"],
    "quantization_config": [{"quant_method": "fp8"}],
    "partial_rotary_factor": [0.5],
    "rope_scaling": ["yarn", [1]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values]
)
def test_values_out_of_range_are_refused_by_name(tmp_path, key, value):
    message = refusal(tmp_path, **{key: value})
    assert f"{key} is " in message
    assert "; allowed: " in message


@pytest.mark.parametrize(
    ("rope", "what"),
    [
        ({"mscale": 0.7}, "mscale is 0.7; allowed: both mscale and mscale_all_dim"),
        ({"mscale_all_dim": 0.7}, "mscale_all_dim is 0.7; allowed: both mscale and mscale_all_dim"),
        ({"mscale": 0, "mscale_all_dim": 1}, "mscale_all_dim is 1; allowed: both mscale and"),
        ({"mscale": "1"}, "mscale is '1'"),
        ({"mscale": 1, "mscale_all_dim": -1}, "mscale_all_dim is -1; allowed: a number"),
        ({"factor": 0}, "factor is 0"),
        ({"rope_type": "dynamic"}, "rope_type is 'dynamic'"),
        ({"rope_type": "longrope"}, "rope_type is 'longrope'"),
    ],
)
def test_rotations_that_are_refused(tmp_path, rope, what):
    assert f"rope_parameters.{what}" in refusal(tmp_path, rope_parameters=YARN | rope)


def test_every_problem_with_the_tensors_is_told_at_once(tmp_path):
    """What is stored has queries through a latent, its config.json says that it has not."""
    directory = write_checkpoint(tmp_path / "model", "deepseek_v2", q_lora_rank=20)
    changes = {"q_lora_rank": None, "v_head_dim": 11, "n_shared_experts": 0}
    (directory / "config.json").write_text(json.dumps(make_config("deepseek_v2", **changes)))
    with pytest.raises(CheckpointError) as caught:
        models.load(directory)
    message = str(caught.value)
    for name in ("q_proj.weight", "q_a_proj.weight", "kv_b_proj.weight", "shared_experts"):
        assert name in message
