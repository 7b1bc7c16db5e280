"""Every key of config.json that the published configurations honour is honoured or refused by name."""

import importlib
import json
from pathlib import Path

import pytest

from tests.tiny import make_config, write_checkpoint
from wscope_jax import models
from wscope_jax.errors import CheckpointError
from wscope_jax.models.config import MAX_LAYERS


def read(tmp_path, family="qwen3_moe", generation=None, **changes):
    """The configuration of a directory that holds nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(make_config(family, **changes)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return models.read_config(tmp_path)


def refusal(tmp_path, family="qwen3_moe", **changes):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, family, **changes)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_keys_arrive_where_they_belong(tmp_path, family):
    config = read(tmp_path, family, rms_norm_eps=1e-4, head_dim=6, max_position_embeddings=99)
    assert (config.model_type, config.vocab_size, config.hidden_size) == (family, 128, 32)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_positions, config.rms_norm_eps) == (6, 99, 1e-4)
    assert (config.num_experts, config.num_experts_per_tok, config.expert_size) == (8, 2, 24)
    assert (config.rope.theta, config.rope.dim, config.rope.kind) == (1e6, 6, "default")
    assert config.dtype == "bfloat16"
    assert hash(config) == hash(
        read(tmp_path, family, rms_norm_eps=1e-4, head_dim=6, max_position_embeddings=99)
    )


@pytest.mark.parametrize(
    ("model_type", "theta", "heads", "num_experts", "bos", "eos"),
    [("qwen3_moe", 1e4, (32, 4, 64), 128, None, ()), ("mixtral", 1e6, (32, 8, 128), 8, 1, (2,))],
)
def test_absent_keys_take_the_published_defaults(
    tmp_path, model_type, theta, heads, num_experts, bos, eos
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = models.read_config(tmp_path)
    assert config.rope.theta == theta
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == heads
    assert config.num_experts == num_experts
    assert (config.bos_token_id, config.eos_token_ids) == (bos, eos)
    assert config.dtype is None
    if model_type == "qwen3_moe":
        assert config.norm_topk_prob is False


def test_head_dim_is_derived_where_absent_or_null(tmp_path):
    assert read(tmp_path, head_dim=...).head_dim == 8
    assert read(tmp_path, head_dim=None).head_dim == 8


def test_dense_layers_follow_the_list_and_the_step(tmp_path):
    config = read(tmp_path, num_hidden_layers=6, mlp_only_layers=[1, 3], decoder_sparse_step=2)
    assert [config.is_sparse(i) for i in range(6)] == [False] * 5 + [True]
    assert config.dense_size == 48
    config = read(tmp_path, num_hidden_layers=2, mlp_only_layers=None, decoder_sparse_step=1)
    assert config.is_sparse(0)
    assert not read(tmp_path, num_experts=0).is_sparse(0)


def test_both_spellings_of_the_number_of_experts(tmp_path):
    assert read(tmp_path, num_experts=..., num_local_experts=4).num_experts == 4
    assert read(tmp_path, "mixtral", num_local_experts=..., num_experts=4).num_experts == 4
    assert read(tmp_path, num_experts=4, num_local_experts=4).num_experts == 4
    message = refusal(tmp_path, num_experts=4, num_local_experts=8)
    assert "num_experts is 4; allowed: the same as num_local_experts, 8" in message


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (5, None, (5,)),
        ([5, 6, 5], None, (5, 6)),
        (5, {}, (5,)),
        (5, {"eos_token_id": None}, (5,)),
        (5, {"eos_token_id": 7}, (7,)),
        (5, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, None, ()),
    ],
)
def test_ids_that_end_a_text(tmp_path, own, generation, expected):
    assert read(tmp_path, eos_token_id=own, generation=generation).eos_token_ids == expected


def test_ids_out_of_the_vocabulary_are_refused(tmp_path):
    message = refusal(tmp_path, eos_token_id=128)
    assert "eos_token_id is 128; allowed: null, or integers from 0 to 127" in message
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is \[3, -1\]"):
        read(tmp_path, generation={"eos_token_id": [3, -1]})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_the_dtype(tmp_path, key):
    changes = {"dtype": ..., "torch_dtype": ...} | {key: "float32"}
    assert read(tmp_path, **changes).dtype == "float32"


def test_a_float16_checkpoint_wants_a_choice(tmp_path):
    directory = write_checkpoint(tmp_path / "half", dtype="float16")
    with pytest.raises(CheckpointError, match="its dtype is 'float16'; choose dtype float32"):
        models.load(directory)
    assert str(models.load(directory, "float32").embedding[...].dtype) == "float32"


def test_without_a_dtype_the_embedding_decides(tmp_path):
    directory = write_checkpoint(tmp_path / "model", dtype="float32")
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    assert str(models.load(directory).embedding[...].dtype) == "float32"


REFUSED = {
    "vocab_size": [0, -1, 1 << 40, 1.5, "128", True, [128]],
    "hidden_size": [0, -32, 1 << 30, 32.0, "x"],
    "num_hidden_layers": [0, MAX_LAYERS + 1, 10**30, 2.0, False],
    "num_attention_heads": [0, -4, "4"],
    "num_key_value_heads": [0, 3, 8, -1],
    "head_dim": [0, 15, -16, 16.5],
    "max_position_embeddings": [0, -1, 1 << 31],
    "rms_norm_eps": [-1e-6, 2, "1e-6", True, 10**400],
    "num_experts": [-1, 1 << 20, 2.5],
    "num_experts_per_tok": [0, 9, -1, "2"],
    "moe_intermediate_size": [0, -24, "a"],
    "intermediate_size": [0, -1],
    "norm_topk_prob": [1, "yes"],
    "attention_bias": [1, "true"],
    "tie_word_embeddings": [0, "no"],
    "decoder_sparse_step": [0, -1, 1.5],
    "mlp_only_layers": [[-1], ["0"], "all", [True], {"a": 1}],
    "hidden_act": ["gelu", "relu", 3],
    "dtype": ["int8", "float64", 3],
    "quantization_config": [{"quant_method": "fp8"}],
    "per_layer_config": [{"0": {}}],
    "layer_types": [["sliding_attention", "full_attention"], "full_attention"],
    "bos_token_id": [128, -1, "a", 1.0],
    "eos_token_id": [[1, 200], "</s>"],
    "partial_rotary_factor": [0.5],
    "rope_theta": [0, -1, 1e300, "1e4", True],
    "rope_scaling": ["linear", [1]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values]
)
def test_values_out_of_range_are_refused_by_name(tmp_path, key, value):
    changes = {"rope_parameters": ...} if key == "rope_theta" else {}
    message = refusal(tmp_path, **changes | {key: value})
    assert f"{key} is " in message
    assert "; allowed: " in message


@pytest.mark.parametrize(
    ("key", "value"), [("num_local_experts", 0), ("intermediate_size", 0), ("sliding_window", 1024)]
)
def test_mixtral_refuses_too(tmp_path, key, value):
    assert f"{key} is {value}; allowed: " in refusal(tmp_path, "mixtral", **{key: value})


def test_sliding_windows(tmp_path):
    assert read(tmp_path, sliding_window=64)  # not used
    assert read(tmp_path, sliding_window=64, use_sliding_window=False)
    assert read(tmp_path, "mixtral", sliding_window=4096)
    message = refusal(tmp_path, sliding_window=4095, use_sliding_window=True)
    assert (
        "sliding_window is 4095; allowed: null, or at least max_position_embeddings, 4096"
        in message
    )
    # Where the key is absent the published default counts: 4,096 positions.
    message = refusal(
        tmp_path, sliding_window=..., use_sliding_window=True, max_position_embeddings=5000
    )
    assert "sliding_window is missing; allowed: null, or at least" in message
    assert refusal(tmp_path, "mixtral", sliding_window=0)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "what"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type is 'dynamic'; allowed: default, linear",
        ),
        ({"type": "longrope", "factor": 2.0}, "type is 'longrope'; allowed: default"),
        ({"rope_type": "proportional"}, "rope_type is 'proportional'"),
        ({"rope_type": "axial"}, "rope_type is 'axial'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": "4"}, "factor is '4'"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0; allowed: more than"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor is None"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (YARN | {"attention_factor": -1.0}, "attention_factor is -1.0"),
        (YARN | {"truncate": 1}, "truncate is 1"),
    ],
)
def test_rotations_that_are_refused(tmp_path, rope, what):
    assert f"rope_parameters.{what}" in refusal(tmp_path, rope_parameters=rope)
    assert f"rope_scaling.{what}" in refusal(tmp_path, rope_parameters=..., rope_scaling=rope)


def test_both_spellings_of_the_rotation(tmp_path):
    new = read(tmp_path, rope_parameters=YARN).rope
    scaling = {"type": "yarn", "factor": 4.0}
    old = read(tmp_path, rope_parameters=..., rope_theta=1e4, rope_scaling=scaling).rope
    assert new == old
    assert new.original_positions == 4096
    assert read(tmp_path, rope_parameters=..., rope_scaling=None, rope_theta=500).rope.theta == 500
    # rope_scaling counts more where both stand there, as in the published code.
    both = read(tmp_path, rope_parameters=YARN, rope_scaling={"type": "linear", "factor": 2})
    assert both.rope.kind == "linear"


MARKER = "executed"
CODE = f"import pathlib; pathlib.Path(__file__).with_name({MARKER!r}).touch()\n"
AUTO_MAP = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}


@pytest.mark.parametrize("name", ["modeling.py", "configuration.py", "tokenization.py"])
def test_code_in_the_checkpoint_is_never_executed(tmp_path, name, caplog):
    directory = write_checkpoint(tmp_path / "model", auto_map=AUTO_MAP)
    (directory / name).write_text(CODE)
    models.load(directory)
    assert "auto_map is ignored" in caplog.text
    for changes in ({"model_type": "evil"}, {"architectures": ["EvilForCausalLM"]}):
        config = make_config("qwen3_moe", auto_map=AUTO_MAP) | changes
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as caught:
            models.load(directory)
        message = str(caught.value)
        assert "is not supported; supported are mixtral (MixtralForCausalLM), qwen3_moe" in message
        assert message.endswith("the code that auto_map names is never executed")
    assert not (directory / MARKER).exists()


@pytest.mark.parametrize("model_type", [None, 7, ["qwen3_moe"], {}, "llama", "x" * 1000])
def test_unknown_model_types_list_the_known(tmp_path, model_type):
    message = refusal(tmp_path, model_type=model_type)
    assert "supported are mixtral (MixtralForCausalLM), qwen3_moe (Qwen3MoeForCausalLM)" in message
    assert len(message) < 500
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="model_type None with architectures None"):
        models.read_config(tmp_path)


def test_no_second_import_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(models.__file__).parents[2]))
    with pytest.raises(ImportError, match=r"import wscope_jax\.models, not models"):
        importlib.import_module("models")
