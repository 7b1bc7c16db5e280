"""What a schedule is, and what it needs of a model."""

from typing import Any, NamedTuple, Protocol

import jax

from wscope_jax.layout import Entries
from wscope_jax.views import Views


class Job(NamedTuple):
    """One host job of a step: a layer and the rows whose queries it carries."""

    layer: int
    first_row: int
    num_rows: int


class Projection(NamedTuple):
    """What a layer computes before its attention, for N tokens.

    Attributes:
        q: [N, H, K], rotated, not scaled.
        entries: new entries, one `Entries` per stream of the layer.
        carry: model state that the cache keeps and never reads.
        attended: of a whole prompt, the keys and values that q is made for; None where these are the entries.
    """

    q: jax.Array
    entries: tuple[Entries, ...]
    carry: Any = None
    attended: Entries | None = None


class Model(Protocol):
    """The functions of a model that schedules chain; N tokens are the rows of a batch or the tokens of a prompt."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        ...

    def embed(self, ids: jax.Array) -> jax.Array:
        """Embeds int32 ids [N]: [N, M]."""
        ...

    def project(self, layer: int, x: jax.Array, pos: jax.Array, carry: Any) -> Projection:
        """Queries and entries of layer `layer` from its input [N, M] at positions int32 [N]."""
        ...

    def finish(
        self, layer: int, x: jax.Array, o: jax.Array, valid: jax.Array | None = None
    ) -> jax.Array:
        """Output projection, residual and feed-forward: [N, M] from the attention output [N, H, V]."""
        ...

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 logits [N, vocabulary]."""
        ...

    def scale(self, layer: int) -> float:
        """Softmax scale of layer `layer`, static."""
        ...


class Schedule(Protocol):
    """Chains the functions of a model into one decode step; hashable and static."""

    def jobs(self, num_layers: int, batch: int) -> tuple[Job, ...]:
        """The step's host jobs in the order of their starts; their ends come in the same order."""
        ...

    def __call__(self, model: Model, ids: jax.Array, views: Views) -> tuple[jax.Array, Views]:
        """One step: logits [B, vocabulary] for ids int32 [B], and the views, advanced by one token."""
        ...
