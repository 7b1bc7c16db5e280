"""Other schedules fit the seams: two mini-batches with two host jobs open give the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engines import engine, golden
from wscope_jax.attention import begin, end
from wscope_jax.policies import CpuOnly, WriteScope
from wscope_jax.schedules import Job, Model
from wscope_jax.views import Views


@dataclasses.dataclass(frozen=True)
class TwoHalves:
    """FastDecode's alternation: start A, start B, end A, end B."""

    def jobs(self, num_layers: int, batch: int) -> tuple[Job, ...]:
        halves = ((0, batch // 2), (batch // 2, batch - batch // 2))
        return tuple(Job(i, first, num) for i in range(num_layers) for first, num in halves)

    def __call__(self, model: Model, ids: jax.Array, views: Views) -> tuple[jax.Array, Views]:
        views = views.begin()
        halves = [slice(j.first_row, j.first_row + j.num_rows) for j in self.jobs(1, len(ids))]
        xs = [model.embed(ids[half]) for half in halves]
        for i in range(model.num_layers):
            view, news, qs = views[i], [], []
            for half, x in zip(halves, xs, strict=True):
                news.append(model.project(i, x, views.positions[half], None))
                rows = view.rows(half.start, len(x))
                q, rows = begin(news[-1].q, rows, scale=model.scale(i))
                view = view.put_rows(half.start, rows)
                qs.append(q)
            for n, (half, new, q) in enumerate(zip(halves, news, qs, strict=True)):
                rows = view.rows(half.start, len(xs[n]))
                o, rows = end(q, new.entries[0], rows, scale=model.scale(i))
                view = view.put_rows(half.start, rows)
                xs[n] = model.finish(i, xs[n], o)
            views = views.put(i, view)
        return model.logits(jnp.concatenate(xs)), views.advance()


@pytest.mark.parametrize(
    "policy", [CpuOnly(), WriteScope(share=0.5)], ids=["cpu_only", "share_0.5"]
)
def test_two_halves(policy: CpuOnly | WriteScope) -> None:
    data, eng = golden("qwen3_moe"), engine()
    texts = np.stack([data.long_ids[:200], data.long_ids[200:400], data.long_ids[400:600]])
    eng.policy = policy
    expected = eng.score(texts, 70)
    eng.policy = dataclasses.replace(policy, schedule=TwoHalves())
    np.testing.assert_allclose(eng.score(texts, 70), expected, atol=1e-5, rtol=0)
