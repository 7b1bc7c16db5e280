"""Tensor names of DeepSeek-V2 and V2-Lite."""

from collections.abc import Sequence
from typing import Final

from wscope_jax.checkpoint import Piece
from wscope_jax.models.deepseek_v2.config import DeepseekV2Config
from wscope_jax.models.tensors import (
    Key,
    Table,
    Way,
    attention_table,
    experts_table,
    ffn_table,
    outer_table,
    whole,
)

LOW_RANK: Final = {"q_a_proj": "down", "q_a_layernorm": "norm", "q_b_proj": "up"}
ATTENTION: Final = ("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "o_proj.weight")
BIASES: Final = ("kv_a_proj_with_mqa.bias", "o_proj.bias")
FFN: Final = ("gate_proj", "up_proj", "down_proj")


def weight_table(config: DeepseekV2Config) -> Table:
    """Where a checkpoint stores each parameter of the model of `config`."""
    attention = [*ATTENTION, *BIASES] if config.attention_bias else [*ATTENTION]
    if config.q_lora_rank is None:
        attention.append("q_proj.weight")
    plain, value = config.qk_nope_head_dim, config.v_head_dim
    table = outer_table(config)
    for layer in range(config.num_layers):
        prefix, key = f"model.layers.{layer}", ("layers", layer)
        table |= attention_table(layer, attention)
        if config.q_lora_rank is not None:
            table |= low_rank_table((*key, "attention", "q_proj"), prefix, config.attention_bias)
        up = f"{prefix}.self_attn.kv_b_proj.weight"
        table[*key, "attention", "key_up"] = [rows_of_heads(up, 0, plain + value)]
        table[*key, "attention", "value_up"] = [rows_of_heads(up, plain, plain + value)]
        if not config.is_sparse(layer):
            table |= ffn_table((*key, "ffn"), f"{prefix}.mlp", FFN)
            continue
        table |= experts_table(layer, config.num_experts, "mlp", FFN)
        if config.shared_size:
            table |= ffn_table((*key, "ffn", "shared"), f"{prefix}.mlp.shared_experts", FFN)
    return table


def low_rank_table(key: Key, prefix: str, has_bias: bool) -> dict[Key, Sequence[Way]]:
    """The queries' projection through a latent, at `key`, of the layer whose published name is `prefix`."""
    table: dict[Key, Sequence[Way]] = {
        (*key, name, "weight"): [whole(f"{prefix}.self_attn.{stored}.weight")]
        for stored, name in LOW_RANK.items()
    }
    if has_bias:
        table[*key, "down", "bias"] = [whole(f"{prefix}.self_attn.q_a_proj.bias")]
    return table


def rows_of_heads(name: str, first: int, per_head: int) -> Way:
    """The parameter [H, n, R] is n rows, from row `first` on, of each head's `per_head` rows of a stored tensor."""

    def pieces(shape: tuple[int, ...]) -> tuple[Piece, ...]:
        heads, _, rank = shape
        stored = (heads * per_head, rank)
        return tuple(Piece(name, stored, (h * per_head + first) * rank) for h in range(heads))

    return pieces
