"""Multi-head latent attention: what is stored of a token is one latent vector, whatever the number of heads.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, equations 9 to 19.
"""

from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from wscope_jax.layout import Entries, EntryLayout
from wscope_jax.models.blocks import Attention, DType, Linear, RMSNorm, multiply
from wscope_jax.models.deepseek_v2.config import DeepseekV2Config
from wscope_jax.models.rope import rotate
from wscope_jax.schedules import Projection

LATENT_EPS: Final = 1e-6  # of the norms of latents, in every published model


class LowRank(nnx.Module):
    """A projection through a normed latent.

    Attributes:
        down: to the latent.
        norm: of the latent.
        up: from the latent.
    """

    def __init__(
        self, num_in: int, rank: int, num_out: int, dtype: DType, *, has_bias: bool
    ) -> None:
        self.down = Linear(num_in, rank, dtype, has_bias=has_bias)
        self.norm = RMSNorm(rank, LATENT_EPS, dtype)
        self.up = Linear(rank, num_out, dtype)

    def __call__(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """The rows of `x` through both projections, in their dtype."""
        return self.up(self.norm(self.down(x)))


class LatentAttention(Attention):
    """What surrounds latent attention.

    An entry is the normed latent c and the rotated part of the key, which all heads share. With W_uk absorbed into the
    queries and W_uv applied to the result, the heads attend to entries as they are: one kv head, whose value is the
    latent. This is the form of decode. A prompt is attended to with the keys and values of each head if that costs
    less; they are made of its entries and forgotten.

    Attributes:
        config: the sizes (static).
        q_proj: the queries of all heads, in the larger models through a latent of their own.
        key_up: W_uk [H, P, R], P plain numbers of a key.
        value_up: W_uv [H, V, R].
    """

    def __init__(self, config: DeepseekV2Config, dtype: DType) -> None:
        width, heads, rank = config.hidden_size, config.num_q_heads, config.kv_lora_rank
        key_dim = rank + config.qk_rope_head_dim
        q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        q_rank, has_bias = config.q_lora_rank, config.attention_bias
        self.config = config
        self.q_proj = (
            Linear(width, q_width, dtype)
            if q_rank is None
            else LowRank(width, q_rank, q_width, dtype, has_bias=has_bias)
        )
        self.kv_a_proj_with_mqa = Linear(width, key_dim, dtype, has_bias=has_bias)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_EPS, dtype)
        self.key_up = nnx.Param(jnp.zeros((heads, config.qk_nope_head_dim, rank), dtype))
        self.value_up = nnx.Param(jnp.zeros((heads, config.v_head_dim, rank), dtype))
        self.o_proj = Linear(heads * config.v_head_dim, width, dtype, has_bias=has_bias)
        self.scale = config.softmax_scale
        self.layout = EntryLayout(
            num_kv_heads=1, key_dim=key_dim, value_dim=rank, value_in_key=True
        )

    def query(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Float[Array, "N H K"]:
        """Queries for the entries: [q_plain W_uk | q_rotated], not scaled."""
        plain_NHP, rotated_NHk = self._head_queries(x, pos)
        return jnp.concatenate(
            [_each_head("hnp,hpr->hnr", plain_NHP, self.key_up[...]), rotated_NHk], axis=-1
        )

    def entries(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Entries:
        """[c | rotated key part] for all heads; the value is c."""
        rank = self.config.kv_lora_rank
        down_NK = self.kv_a_proj_with_mqa(x)
        latent_NR = self.kv_a_layernorm(down_NK[:, :rank])
        rotated_N1k = rotate(down_NK[:, None, rank:], pos, self.config.rope)
        return Entries(jnp.concatenate([latent_NR[:, None], rotated_N1k], axis=-1), None)

    def output(self, o: Float[Array, "N H R"]) -> Float[Array, "N M"]:
        """W_uv on each head's context in latent space, then the output projection of all heads together."""
        return self._join(_each_head("hnr,hvr->hnv", o, self.value_up[...]))

    def project_prompt(self, x: Float[Array, "T M"], pos: Int32[Array, " T"]) -> Projection:
        """Queries for the entries, or for the keys of each head: whichever form costs less."""
        entries = self.entries(x, pos)
        if not self._expands(x.shape[0]):
            return Projection(self.query(x, pos), (entries,))
        q_THK = jnp.concatenate(self._head_queries(x, pos), axis=-1)
        return Projection(q_THK, (entries,), attended=self.expand(entries))

    def prompt_output(self, o: Float[Array, "T H V"]) -> Float[Array, "T M"]:
        """See `Attention.prompt_output`."""
        return self._join(o) if self._expands(o.shape[0]) else self.output(o)

    def expand(self, entries: Entries) -> Entries:
        """Keys [T, H, P + rotated] and values [T, H, V] of each head."""
        rank, num = self.config.kv_lora_rank, entries.key.shape[0]
        latent_TR, rotated_T1k = entries.key[:, 0, :rank], entries.key[:, :, rank:]

        def of_heads(up: Float[Array, "H V R"]) -> Float[Array, "T H V"]:
            y_TI = multiply(latent_TR, up.reshape(-1, rank))
            return y_TI.reshape(num, *up.shape[:2]).astype(latent_TR.dtype)

        plain_THP = of_heads(self.key_up[...])
        rotated_THk = jnp.broadcast_to(rotated_T1k, (*plain_THP.shape[:2], rotated_T1k.shape[-1]))
        key_THK = jnp.concatenate([plain_THP, rotated_THk], axis=-1)
        return Entries(key_THK, of_heads(self.value_up[...]))

    def _expands(self, num_tokens: int) -> bool:
        flops = self.config.prompt_flops(num_tokens)
        return flops.expanded < flops.absorbed

    def _head_queries(
        self, x: Float[Array, "N M"], pos: Int32[Array, " N"]
    ) -> tuple[Float[Array, "N H P"], Float[Array, "N H k"]]:
        """The plain and the rotated part of each head's query."""
        q_NHK = self.q_proj(x).reshape(x.shape[0], self.config.num_q_heads, -1)
        plain = self.config.qk_nope_head_dim
        return q_NHK[..., :plain], rotate(q_NHK[..., plain:], pos, self.config.rope)

    def _join(self, o: Float[Array, "N H V"]) -> Float[Array, "N M"]:
        return self.o_proj(o.reshape(o.shape[0], -1))


def _each_head(
    subscripts: str, x: Float[Array, "N H I"], weight: Float[Array, "H _ _"]
) -> Float[Array, "N H O"]:
    """The product of each head of `x` with its own matrix, in the dtype of `x`."""
    y_HNO = jnp.einsum(
        subscripts,
        x.swapaxes(0, 1),  # XLA:CPU has no product of bfloat16 matrices whose batch is not in front
        weight,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y_HNO.swapaxes(0, 1).astype(x.dtype)
