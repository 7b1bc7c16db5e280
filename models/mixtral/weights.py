"""Tensor names of Mixtral."""

from typing import Final

from wscope_jax.models.mixtral.config import MixtralConfig
from wscope_jax.models.tensors import Table, attention_table, experts_table, outer_table

ATTENTION: Final = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
EXPERT: Final = ("w1", "w3", "w2")  # gate, up, down


def weight_table(config: MixtralConfig) -> Table:
    """Where a checkpoint stores each parameter of the model of `config`."""
    table = outer_table(config)
    for layer in range(config.num_layers):
        table |= attention_table(layer, ATTENTION)
        table |= experts_table(layer, config.num_experts, "block_sparse_moe", EXPERT)
    return table
