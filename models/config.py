"""Configurations: what all families have, and what decoders with grouped-query attention have."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from wscope_jax.models.fields import Fields
from wscope_jax.models.rope import MAX_POSITIONS, Rope, read_rope

MAX_LAYERS: Final = 1024
MAX_EXPERTS: Final = 4096
MAX_WIDTH: Final = 1 << 20  # of any one dimension of a layer
MAX_VOCAB: Final = 1 << 24
DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every family's configuration says; hashable.

    Attributes:
        model_type: name of the family.
        vocab_size: rows of the embedding.
        hidden_size: M, width of the residual stream.
        num_layers: decoder layers.
        rms_norm_eps: epsilon of the RMS norms.
        max_positions: positions that the model was made for.
        tie_word_embeddings: the head is the embedding.
        dtype: dtype that config.json names, or None.
        bos_token_id: id that begins a text, or None.
        eos_token_ids: ids that end a text; may be empty.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(ModelConfig):
    """A decoder with routed experts.

    Attributes:
        num_q_heads: H.
        rope: rotation of queries and keys, or of a part of them.
        num_experts: E, routed experts of a sparse layer.
        num_experts_per_tok: X, experts that a token enters.
        expert_size: F, width of an expert.
    """

    num_q_heads: int
    rope: Rope
    num_experts: int
    num_experts_per_tok: int
    expert_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaConfig(MoeConfig):
    """A decoder with grouped-query attention and routed experts.

    Attributes:
        num_kv_heads: G, a divisor of H.
        head_dim: K, the width of a key and of a value.
    """

    num_kv_heads: int
    head_dim: int


def read_model(fields: Fields, generation: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that all families have: keyword arguments of `ModelConfig`.

    Args:
        fields: keys of config.json.
        generation: keys of generation_config.json; its ids that end a text count more.
        defaults: the family's value of each key that may be absent.

    Raises:
        CheckpointError: A value is out of its range, or a key is not supported.
    """
    fields.choice("hidden_act", "silu", ("silu", "swish"))
    fields.absent("quantization_config")
    fields.absent("per_layer_config")
    vocab_size = fields.integer("vocab_size", defaults["vocab_size"], 1, MAX_VOCAB)
    last = vocab_size - 1
    bos = fields.integers("bos_token_id", 0, last, defaults.get("bos_token_id"))
    eos = fields.integers("eos_token_id", 0, last, defaults.get("eos_token_id"))
    positions = defaults["max_position_embeddings"]
    return {
        "model_type": fields.get("model_type"),
        "vocab_size": vocab_size,
        "hidden_size": read_width(fields, defaults, "hidden_size"),
        "num_layers": fields.integer(
            "num_hidden_layers", defaults["num_hidden_layers"], 1, MAX_LAYERS
        ),
        "rms_norm_eps": fields.number("rms_norm_eps", defaults["rms_norm_eps"], 0.0, 1.0),
        "max_positions": fields.integer("max_position_embeddings", positions, 1, MAX_POSITIONS),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "dtype": read_dtype(fields),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": generation.integers("eos_token_id", 0, last) or eos,
    }


def read_width(fields: Fields, defaults: Mapping[str, Any], key: str) -> int:
    """A dimension of a layer.

    Raises:
        CheckpointError: It is out of its range.
    """
    return fields.integer(key, defaults[key], 1, MAX_WIDTH)


def read_dtype(fields: Fields) -> str | None:
    """The dtype that config.json names under either spelling of the key, if it does.

    Raises:
        CheckpointError: It is unknown.
    """
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return None if fields.get(key) is None else fields.choice(key, "", DTYPES)


def read_gqa(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What concerns attention: those keyword arguments of `GqaConfig` that `ModelConfig` lacks, without the experts.

    Raises:
        CheckpointError: A value is out of its range, or the attention is not over the whole text.
    """
    heads = read_width(fields, defaults, "num_attention_heads")
    kv_key = "num_key_value_heads"
    # An absent key takes the family's default, null means one kv head per query head.
    absent = kv_key not in fields.values
    kv_heads = fields.integer(kv_key, defaults[kv_key] if absent else heads, 1, MAX_WIDTH)
    if heads % kv_heads:
        raise fields.refuse(kv_key, f"a divisor of num_attention_heads, {heads}")
    hidden = read_width(fields, defaults, "hidden_size")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), 1, MAX_WIDTH)
    if head_dim % 2:
        raise fields.refuse("head_dim", "an even number (or null: hidden_size / heads, even too)")
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise fields.refuse("layer_types", "null or full_attention in every layer")
    positions = fields.integer(
        "max_position_embeddings", defaults["max_position_embeddings"], 1, MAX_POSITIONS
    )
    return {
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": read_rope(fields, head_dim, positions, defaults["rope_theta"]),
    }


def check_sliding_window(fields: Fields, default: int | None, max_positions: int) -> None:
    """Checks that a window, if there is one, is no shorter than the text may be.

    Raises:
        CheckpointError: It is shorter, or no positive integer.
    """
    if fields.get("sliding_window", default) is None:
        return
    if fields.integer("sliding_window", default, 1, MAX_POSITIONS) < max_positions:
        raise fields.refuse(
            "sliding_window", f"null, or at least max_position_embeddings, {max_positions}"
        )


def read_experts(fields: Fields, defaults: Mapping[str, Any], least: int) -> tuple[int, int]:
    """Number of experts under either spelling of the key, and how many a token enters.

    Args:
        fields: keys of config.json.
        defaults: the family's value of each key that may be absent.
        least: smallest number of experts that is allowed.

    Raises:
        CheckpointError: A value is out of its range, or the two spellings differ.
    """
    key = "num_local_experts" if fields.get("num_local_experts") is not None else "num_experts"
    num = fields.integer(key, defaults["num_experts"], least, MAX_EXPERTS)
    if fields.get("num_experts", num) != num:
        raise fields.refuse("num_experts", f"the same as num_local_experts, {num}")
    if num == 0:
        return 0, 0
    return num, fields.integer("num_experts_per_tok", defaults["num_experts_per_tok"], 1, num)
