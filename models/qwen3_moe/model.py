"""Qwen3-MoE: norms on query and key heads, experts in every layer or in some."""

from wscope_jax.models.blocks import Attention, DenseFfn, DType, Layer, SparseFfn
from wscope_jax.models.decoder import Decoder
from wscope_jax.models.qwen3_moe.config import Qwen3MoeConfig


class Qwen3Moe(Decoder):
    """The model of a `Qwen3MoeConfig`, its parameters zeros of one dtype."""

    def __init__(self, config: Qwen3MoeConfig, dtype: DType) -> None:
        def layer(i: int) -> Layer:
            attention = Attention(
                config, dtype, has_head_norms=True, has_bias=config.attention_bias
            )
            ffn = (
                SparseFfn(config, dtype, normalise=config.norm_topk_prob)
                if config.is_sparse(i)
                else DenseFfn(config.hidden_size, config.dense_size, dtype)
            )
            return Layer(config, dtype, attention, ffn)

        super().__init__(config, [layer(i) for i in range(config.num_layers)], dtype)
