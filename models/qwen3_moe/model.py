"""Qwen3-MoE: norms on query and key heads, experts in every layer or in some."""

from wscope_jax.experts import Routing
from wscope_jax.models.blocks import DenseFfn, DType, GroupedAttention, Layer, SparseFfn
from wscope_jax.models.decoder import Decoder
from wscope_jax.models.qwen3_moe.config import Qwen3MoeConfig


class Qwen3Moe(Decoder):
    """The model of a `Qwen3MoeConfig`, its parameters zeros of one dtype."""

    def __init__(self, config: Qwen3MoeConfig, dtype: DType) -> None:
        routing = Routing(top_k=config.num_experts_per_tok, normalise=config.norm_topk_prob)

        def layer(i: int) -> Layer:
            attention = GroupedAttention(
                config, dtype, has_head_norms=True, has_bias=config.attention_bias
            )
            ffn = (
                SparseFfn(config, dtype, routing)
                if config.is_sparse(i)
                else DenseFfn(config.hidden_size, config.dense_size, dtype)
            )
            return Layer(config, dtype, attention, ffn)

        super().__init__(config, [layer(i) for i in range(config.num_layers)], dtype)
