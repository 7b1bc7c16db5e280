"""Mixtral: plain grouped-query attention, experts in every layer."""

from wscope_jax.experts import Routing
from wscope_jax.models.blocks import DType, GroupedAttention, Layer, SparseFfn
from wscope_jax.models.decoder import Decoder
from wscope_jax.models.mixtral.config import MixtralConfig


class Mixtral(Decoder):
    """The model of a `MixtralConfig`, its parameters zeros of one dtype."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        routing = Routing(top_k=config.num_experts_per_tok, normalise=True)

        def layer() -> Layer:
            attention = GroupedAttention(config, dtype, has_head_norms=False, has_bias=False)
            return Layer(config, dtype, attention, SparseFfn(config, dtype, routing))

        super().__init__(config, [layer() for _ in range(config.num_layers)], dtype)
