"""Mixtral: plain grouped-query attention, experts in every layer."""

from wscope_jax.models.blocks import Attention, DType, Layer, SparseFfn
from wscope_jax.models.decoder import Decoder
from wscope_jax.models.mixtral.config import MixtralConfig


class Mixtral(Decoder):
    """The model of a `MixtralConfig`, its parameters zeros of one dtype."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        def layer() -> Layer:
            attention = Attention(config, dtype, has_head_norms=False, has_bias=False)
            return Layer(config, dtype, attention, SparseFfn(config, dtype, normalise=True))

        super().__init__(config, [layer() for _ in range(config.num_layers)], dtype)
