"""Configuration of Mixtral."""

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

DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(GqaConfig):
    """Mixtral: experts in every layer, their weights always scaled to sum to one."""


def read_config(fields: Fields, generation: Fields) -> MixtralConfig:
    """The configuration from the keys of config.json and generation_config.json.

    Raises:
        CheckpointError: A key has a value that is out of its range or not supported.
    """
    model = read_model(fields, generation, DEFAULTS)
    check_sliding_window(fields, None, model["max_positions"])
    num_experts, num_experts_per_tok = read_experts(fields, DEFAULTS, least=1)
    return MixtralConfig(
        **model,
        **read_gqa(fields, DEFAULTS),
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        expert_size=read_width(fields, DEFAULTS, "intermediate_size"),
    )
