"""Tensor names of Qwen3-MoE."""

from typing import Final

from wscope_jax.models.qwen3_moe.config import Qwen3MoeConfig
from wscope_jax.models.tensors import Table, attention_table, experts_table, ffn_table, outer_table

PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
FFN: Final = ("gate_proj", "up_proj", "down_proj")


def weight_table(config: Qwen3MoeConfig) -> Table:
    """Where a checkpoint stores each parameter of the model of `config`."""
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    attention = [f"{name}.{kind}" for name in PROJECTIONS for kind in kinds]
    attention += ["q_norm.weight", "k_norm.weight"]
    table = outer_table(config)
    for layer in range(config.num_layers):
        table |= attention_table(layer, attention)
        if config.is_sparse(layer):
            table |= experts_table(layer, config.num_experts, "mlp", FFN)
        else:
            table |= ffn_table(("layers", layer, "ffn"), f"model.layers.{layer}.mlp", FFN)
    return table
