"""A decoder: embedding, layers, head, and the plain way through them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from wscope_jax.layout import Stream
from wscope_jax.models.blocks import DType, Layer, RMSNorm, multiply
from wscope_jax.models.config import ModelConfig
from wscope_jax.schedules import InOrder, Projection


class Decoder(nnx.Module):
    """A model as pure functions over N tokens: the rows of a batch in decode, those of one prompt in prefill.

    It knows neither cache nor policy: schedules chain these functions with the attention.

    Attributes:
        config: the family's configuration (static).
        layers: the decoder layers.
        embedding: [vocabulary, M].
        norm: norm before the head.
        head: [vocabulary, M], or None where it is the embedding.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[Layer], dtype: DType) -> None:
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.layers = nnx.List(layers)
        self.embedding = nnx.Param(jnp.zeros(table, dtype))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = None if config.tie_word_embeddings else nnx.Param(jnp.zeros(table, dtype))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def streams(self) -> tuple[tuple[Stream, ...], ...]:
        """What each layer stores per token."""
        return tuple(layer.streams for layer in self.layers)

    def embed(self, ids: Int32[Array, " N"]) -> Float[Array, "N M"]:
        """The embeddings of ids, which the caller keeps within the vocabulary."""
        return self.embedding[...].at[ids].get(mode="clip")

    def project(
        self, layer: int, x: Float[Array, "N M"], pos: Int32[Array, " N"], carry: Any = None
    ) -> Projection:
        """See `Layer.project`."""
        return self.layers[layer].project(x, pos, carry)

    def query(
        self, layer: int, x: Float[Array, "N M"], pos: Int32[Array, " N"]
    ) -> Float[Array, "N H K"]:
        """See `Layer.query`."""
        return self.layers[layer].query(x, pos)

    def finish(
        self,
        layer: int,
        x: Float[Array, "N M"],
        o: Float[Array, "N H V"],
        valid: Bool[Array, " N"] | None = None,
    ) -> Float[Array, "N M"]:
        """See `Layer.finish`."""
        return self.layers[layer].finish(x, o, valid)

    def logits(self, x: Float[Array, "N M"]) -> Float[Array, "N O"]:
        """Float32 logits over the vocabulary."""
        with jax.named_scope("head"):
            head = self.embedding if self.head is None else self.head
            return multiply(self.norm(x), head[...])

    def layer_kind(self, layer: int) -> str:
        """Name of the layers that share a compiled program with layer `layer`."""
        return str(self.layers[layer].kind)

    def scale(self, layer: int) -> float:
        """Softmax scale of layer `layer`."""
        return float(self.layers[layer].scale)

    def __call__(self, ids: Int32[Array, " B"], views: Any) -> tuple[Float[Array, "B O"], Any]:
        """One decode step in the plain order: float32 logits, and the cache's views after the step."""
        return InOrder()(self, ids, views)
