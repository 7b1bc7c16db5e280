"""What a decode step has to know of the placement: its plan, and the operands that follow from it."""

from collections.abc import Collection, Sequence

import jax.numpy as jnp
import numpy as np

from wscope_jax.layout import Region
from wscope_jax.placement import Placement
from wscope_jax.step_plan import StepPlan, chunk_table, decode_plan, turn_bucket
from wscope_jax.views import Shared


class DecodePlan:
    """The plan of the next decode step, rebuilt when placement or rows have changed.

    Args:
        placement: where blocks live.
        jobs: host jobs of a step, as the schedule lists them.
        slots_per_chunk: PINNED slots of a chunk; 0 where nothing is streamed.
        uses_host: the program has host jobs.

    Attributes:
        turns: link calls a layer: a bucket, which never shrinks.
        num_chunks: chunks that hold a live block: how much of the turns is used.
        plan: of the next step; None when it must be rebuilt.
    """

    def __init__(
        self,
        placement: Placement,
        jobs: Sequence[tuple[int, int, int]],
        *,
        slots_per_chunk: int,
        uses_host: bool,
    ) -> None:
        self._placement = placement
        self._jobs = jobs
        self._slots_per_chunk = slots_per_chunk
        self._uses_host = uses_host
        self.turns = 1 if slots_per_chunk else 0
        self.num_chunks = 0
        self.plan: StepPlan | None = None

    @property
    def num_jobs(self) -> int:
        """Host jobs of a step."""
        return len(self._jobs)

    @property
    def most_turns(self) -> int:
        """Turns that this placement can ever need."""
        if not self._slots_per_chunk:
            return 0
        return turn_bucket(max(1, -(-self._placement.max_slots // self._slots_per_chunk)))

    def outdate(self) -> None:
        """The placement, or the rows that decode, have changed."""
        self.plan = None

    def refresh(self, active: Collection[int], shared: Shared) -> Shared:
        """Rebuilds the plan for the rows that decode; returns `shared` with the operands that go with it."""
        placement, rows = self._placement, range(len(self._placement.rows))
        spans: list[tuple[int, int]] = []
        owner = np.zeros((0, 0), np.int32)
        if self._slots_per_chunk:
            owner, spans = chunk_table(placement, sorted(active), self._slots_per_chunk)
            self.turns = max(self.turns, turn_bucket(len(spans)))
            surplus = np.full((self.turns - len(spans), self._slots_per_chunk), -1, np.int32)
            owner = np.concatenate([owner, surplus])
        self.num_chunks = len(spans)
        self.plan = decode_plan(
            self._jobs,
            [placement.table(r, Region.UNPINNED) if r in active else [] for r in rows],
            spans,
            self.turns,
            uses_host=self._uses_host,
            uses_link=self._slots_per_chunk > 0,
        )
        return shared._replace(
            owner=jnp.array(owner),
            start=jnp.array([placement.window_start(r) for r in rows], jnp.int32),
            length=jnp.array([placement.rows[r].length for r in rows], jnp.int32),
            active=jnp.array([r in active for r in rows], bool),
        )
