"""Configuration of Qwen3-MoE."""

import dataclasses
from typing import Any, Final

from wscope_jax.models.config import (
    GqaConfig,
    check_sliding_window,
    read_experts,
    read_gqa,
    read_model,
    read_width,
)
from wscope_jax.models.fields import Fields

MAX_LAYER_ID: Final = (1 << 31) - 1
DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "sliding_window": 4096,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(GqaConfig):
    """Qwen3-MoE: per-head norms of queries and keys, and possibly some dense layers.

    Attributes:
        attention_bias: the four projections of the attention have a bias.
        norm_topk_prob: the weights of a token's experts are scaled to sum to one.
        dense_size: width of the feed-forward part of a dense layer.
        sparse_step: every sparse_step-th layer has experts, the others are dense ...
        dense_layers: ... and so are these.
    """

    attention_bias: bool
    norm_topk_prob: bool
    dense_size: int
    sparse_step: int
    dense_layers: tuple[int, ...]

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        listed = layer in self.dense_layers
        return self.num_experts > 0 and not listed and (layer + 1) % self.sparse_step == 0


def read_config(fields: Fields, generation: Fields) -> Qwen3MoeConfig:
    """The configuration from the keys of config.json and generation_config.json.

    Raises:
        CheckpointError: A key has a value that is out of its range or not supported.
    """
    model = read_model(fields, generation, DEFAULTS)
    if fields.flag("use_sliding_window", False):
        check_sliding_window(fields, DEFAULTS["sliding_window"], model["max_positions"])
    num_experts, num_experts_per_tok = read_experts(fields, DEFAULTS, least=0)
    return Qwen3MoeConfig(
        **model,
        **read_gqa(fields, DEFAULTS),
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        expert_size=read_width(fields, DEFAULTS, "moe_intermediate_size"),
        attention_bias=fields.flag("attention_bias", False),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        dense_size=read_width(fields, DEFAULTS, "intermediate_size"),
        sparse_step=fields.integer("decoder_sparse_step", 1, 1, MAX_LAYER_ID),
        dense_layers=fields.integers("mlp_only_layers", 0, MAX_LAYER_ID),
    )
