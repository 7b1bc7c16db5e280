"""The plain schedule: layer after layer, each one's host part alongside its own window and streamed parts."""

import dataclasses
from typing import Final

import jax

from wscope_jax.attention import attend
from wscope_jax.schedules.protocol import Job, Model
from wscope_jax.views import Views


@dataclasses.dataclass(frozen=True)
class InOrder:
    """One host job a layer, with all rows."""

    def jobs(self, num_layers: int, batch: int) -> tuple[Job, ...]:
        """One job a layer."""
        return tuple(Job(layer, 0, batch) for layer in range(num_layers))

    def __call__(self, model: Model, ids: jax.Array, views: Views) -> tuple[jax.Array, Views]:
        """See `Schedule`."""
        views = views.begin()
        x = model.embed(ids)
        for i in range(model.num_layers):
            with jax.named_scope(f"layer_{i}"):
                new = model.project(i, x, views.positions, None)
                o, view = attend(new.q, new.entries[0], views[i], scale=model.scale(i))
                views = views.put(i, view)
                x = model.finish(i, x, o, views.shared.active)
        return model.logits(x), views.advance()


IN_ORDER: Final = InOrder()
