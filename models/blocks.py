"""The parts that decoders share: norms, projections, attention's outer half, feed-forward layers, a layer of them.

Weights keep the published orientation, one row per output. Every product has full precision and is accumulated in
float32; activations are in the dtype of the weights. Parameters are created as zeros: they are filled by the registry.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from wscope_jax.experts import Routing, expert_ffn, router
from wscope_jax.layout import Entries, EntryLayout, Stream
from wscope_jax.models.config import GqaConfig, ModelConfig, MoeConfig
from wscope_jax.models.rope import rotate
from wscope_jax.schedules import Projection

DType = np.dtype[Any]


def multiply(x: Float[Array, "N I"], weight: Float[Array, "O I"]) -> Float[Array, "N O"]:
    """The product of each row of `x` with each row of `weight`, in float32."""
    num = x.shape[0]
    if num == 1 and x.dtype == jnp.bfloat16:
        # XLA:CPU multiplies bfloat16 matrices as they are, but makes a float32 copy of the whole
        # matrix to multiply it with a single vector (20 times slower).
        x = jnp.pad(x, ((0, 1), (0, 0)))
    y_NO = jnp.einsum(
        "ni,oi->no",
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y_NO[:num]


class RMSNorm(nnx.Module):
    """Scales the last axis to a root mean square of one, then by a weight.

    Attributes:
        weight: [dim].
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float, dtype: DType) -> None:
        self.weight = nnx.Param(jnp.zeros(dim, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
        """Computes in float32, rounds, then applies the weight: the published models' order."""
        x32 = x.astype(jnp.float32)
        unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return unit.astype(x.dtype) * weight


class Linear(nnx.Module):
    """x weight^T, plus a bias where there is one.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, num_in: int, num_out: int, dtype: DType, *, has_bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros(num_out, dtype)) if has_bias else None

    def __call__(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """The rows of `x` through the layer, in their dtype."""
        y_NO = multiply(x, self.weight[...])
        if self.bias is not None:
            y_NO = y_NO + self.bias[...].astype(jnp.float32)[None, :]
        return y_NO.astype(x.dtype)


class Attention(nnx.Module):
    """What surrounds a layer's attention: projections, norms, rotation. The attention itself is the cache's.

    Attributes:
        layout: what a token stores (static).
        scale: softmax scale (static).
    """

    layout: EntryLayout
    scale: float

    def query(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Float[Array, "N H K"]:
        """Rotated queries for the entries, not scaled."""
        raise NotImplementedError

    def entries(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Entries:
        """New entries, in the layout."""
        raise NotImplementedError

    def output(self, o: Float[Array, "N H V"]) -> Float[Array, "N M"]:
        """The output projection of all heads together."""
        raise NotImplementedError

    def project_prompt(self, x: Float[Array, "T M"], pos: Int32[Array, " T"]) -> Projection:
        """Queries and entries of a whole prompt."""
        return Projection(self.query(x, pos), (self.entries(x, pos),))

    def prompt_output(self, o: Float[Array, "T H V"]) -> Float[Array, "T M"]:
        """The output projection of what was attended with the queries of `project_prompt`."""
        return self.output(o)


class GroupedAttention(Attention):
    """What surrounds grouped-query attention.

    Attributes:
        q_norm: norm of each query head before the rotation, or None; `k_norm` likewise.
        rope: the rotation (static), `dim` is the head's width.
    """

    def __init__(
        self, config: GqaConfig, dtype: DType, *, has_head_norms: bool, has_bias: bool
    ) -> None:
        width, dim = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_q_heads * dim, config.num_kv_heads * dim
        self.q_proj = Linear(width, q_width, dtype, has_bias=has_bias)
        self.k_proj = Linear(width, kv_width, dtype, has_bias=has_bias)
        self.v_proj = Linear(width, kv_width, dtype, has_bias=has_bias)
        self.o_proj = Linear(q_width, width, dtype, has_bias=has_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if has_head_norms else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if has_head_norms else None
        self.rope = config.rope
        self.scale = dim**-0.5
        self.layout = EntryLayout(num_kv_heads=config.num_kv_heads, key_dim=dim, value_dim=dim)

    def query(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Float[Array, "N H K"]:
        """See `Attention.query`."""
        q_NHK = self._heads(self.q_proj(x))
        return rotate(q_NHK if self.q_norm is None else self.q_norm(q_NHK), pos, self.rope)

    def entries(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Entries:
        """Rotated keys, and values."""
        k_NGK = self._heads(self.k_proj(x))
        k_NGK = k_NGK if self.k_norm is None else self.k_norm(k_NGK)
        return Entries(rotate(k_NGK, pos, self.rope), self._heads(self.v_proj(x)))

    def output(self, o: Float[Array, "N H V"]) -> Float[Array, "N M"]:
        """See `Attention.output`."""
        return self.o_proj(o.reshape(o.shape[0], -1))

    def _heads(self, x: Float[Array, "N I"]) -> Float[Array, "N H K"]:
        return x.reshape(x.shape[0], -1, self.rope.dim)


class DenseFfn(nnx.Module):
    """One SwiGLU feed-forward layer for all tokens."""

    def __init__(self, width: int, size: int, dtype: DType) -> None:
        self.gate_proj = Linear(width, size, dtype)
        self.up_proj = Linear(width, size, dtype)
        self.down_proj = Linear(size, width, dtype)

    def __call__(
        self, x: Float[Array, "N M"], valid: Bool[Array, " N"] | None
    ) -> Float[Array, "N M"]:
        """silu(x gate) * (x up) through down; `valid` does not matter here."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseFfn(nnx.Module):
    """SwiGLU experts of which each token enters a few, and perhaps a part that all tokens enter.

    Attributes:
        router: [E, M].
        gate: [E, F, M]; `up` likewise.
        down: [E, M, F].
        shared: what all tokens enter, or None.
        routing: how the experts of a token are chosen and weighted (static).
    """

    def __init__(
        self, config: MoeConfig, dtype: DType, routing: Routing, shared: DenseFfn | None = None
    ) -> None:
        num, size, width = config.num_experts, config.expert_size, config.hidden_size
        self.router = nnx.Param(jnp.zeros((num, width), dtype))
        self.gate = nnx.Param(jnp.zeros((num, size, width), dtype))
        self.up = nnx.Param(jnp.zeros((num, size, width), dtype))
        self.down = nnx.Param(jnp.zeros((num, width, size), dtype))
        self.shared = shared
        self.routing = routing

    def __call__(
        self, x: Float[Array, "N M"], valid: Bool[Array, " N"] | None
    ) -> Float[Array, "N M"]:
        """The weighted experts of each token, none of those that are not `valid`, and the shared part."""
        with jax.named_scope("router"):
            ids_NX, weights_NX = router(x, self.router[...], self.routing)
        with jax.named_scope("experts"):
            y_NM = expert_ffn(
                x, ids_NX, weights_NX, self.gate[...], self.up[...], self.down[...], valid
            )
        if self.shared is None:
            return y_NM
        with jax.named_scope("shared_experts"):
            return y_NM + self.shared(x, valid)


class Layer(nnx.Module):
    """One decoder layer as the functions that surround its attention.

    Attributes:
        kind: names layers that share a compiled program (static).
        scale: softmax scale (static).
        streams: what the layer stores per token (static).
    """

    def __init__(
        self, config: ModelConfig, dtype: DType, attention: Attention, ffn: DenseFfn | SparseFfn
    ) -> None:
        self.attention = attention
        self.ffn = ffn
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.kind = "sparse" if isinstance(ffn, SparseFfn) else "dense"
        self.scale = attention.scale
        self.streams = (Stream(attention.layout),)

    def project(
        self, x: Float[Array, "N M"], pos: Int32[Array, " N"], carry: Any = None
    ) -> Projection:
        """Queries and new entries of N tokens at positions `pos`."""
        with jax.named_scope("project"):
            h_NM = self.attention_norm(x)
            q_NHK = self.attention.query(h_NM, pos)
            return Projection(q_NHK, (self.attention.entries(h_NM, pos),), carry)

    def query(self, x: Float[Array, "N M"], pos: Int32[Array, " N"]) -> Float[Array, "N H K"]:
        """The queries alone, the same as those of `project`."""
        return self.attention.query(self.attention_norm(x), pos)

    def finish(
        self,
        x: Float[Array, "N M"],
        o: Float[Array, "N H V"],
        valid: Bool[Array, " N"] | None = None,
    ) -> Float[Array, "N M"]:
        """The layer's output from its input and its attention's output; see `SparseFfn` for `valid`."""
        with jax.named_scope("finish"):
            return self._feed_forward(x + self.attention.output(o), valid)

    def project_prompt(
        self, x: Float[Array, "T M"], pos: Int32[Array, " T"], carry: Any = None
    ) -> Projection:
        """`project` for a whole prompt, which may attend to other keys and values than it stores."""
        with jax.named_scope("project"):
            projection = self.attention.project_prompt(self.attention_norm(x), pos)
            return projection._replace(carry=carry)

    def finish_prompt(
        self,
        x: Float[Array, "T M"],
        o: Float[Array, "T H V"],
        valid: Bool[Array, " T"] | None = None,
    ) -> Float[Array, "T M"]:
        """`finish` behind `project_prompt`."""
        with jax.named_scope("finish"):
            return self._feed_forward(x + self.attention.prompt_output(o), valid)

    def _feed_forward(
        self, x: Float[Array, "N M"], valid: Bool[Array, " N"] | None
    ) -> Float[Array, "N M"]:
        return x + self.ffn(self.ffn_norm(x), valid)
