"""DeepSeek-V2: latent attention, dense layers first, then routed and shared experts."""

from wscope_jax.experts import Routing
from wscope_jax.models.blocks import DenseFfn, DType, Layer, SparseFfn
from wscope_jax.models.decoder import Decoder
from wscope_jax.models.deepseek_v2.attention import LatentAttention
from wscope_jax.models.deepseek_v2.config import DeepseekV2Config


class DeepseekV2(Decoder):
    """The model of a `DeepseekV2Config`, its parameters zeros of one dtype."""

    def __init__(self, config: DeepseekV2Config, dtype: DType) -> None:
        width = config.hidden_size
        routing = Routing(
            top_k=config.num_experts_per_tok,
            scale=config.routed_scale,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
        )

        def feed_forward(i: int) -> DenseFfn | SparseFfn:
            if not config.is_sparse(i):
                return DenseFfn(width, config.dense_size, dtype)
            size = config.shared_size
            shared = DenseFfn(width, size, dtype) if size else None
            return SparseFfn(config, dtype, routing, shared)

        layers = [
            Layer(config, dtype, LatentAttention(config, dtype), feed_forward(i))
            for i in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype)
