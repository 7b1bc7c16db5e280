"""The rows that decode, and what their next step has to know of the placement: its plan, and the operands to it."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from wscope_jax.errors import CapacityError
from wscope_jax.evictions import Evictions
from wscope_jax.layout import Region
from wscope_jax.placement import Placement
from wscope_jax.regions import Regions
from wscope_jax.step_plan import StepPlan, chunk_table, decode_plan, turn_bucket
from wscope_jax.views import Shared


class Decoding:
    """The rows that decode, and the plan of their next step, rebuilt when placement or rows have changed.

    Args:
        placement: where blocks live.
        regions: of the cache; their views get the operands.
        evictions: of the cache; a row whose window is full waits for its move.
        jobs: host jobs of a step, as the schedule lists them.
        max_len: tokens that a row may hold.

    Attributes:
        turns: link calls a layer: a bucket, which never shrinks.
        num_chunks: chunks that hold a live block: how much of the turns is used.
        plan: of the next step; None when it must be rebuilt.
    """

    def __init__(
        self,
        placement: Placement,
        regions: Regions,
        evictions: Evictions,
        jobs: Sequence[tuple[int, int, int]],
        *,
        max_len: int,
    ) -> None:
        self._placement = placement
        self._regions = regions
        self._evictions = evictions
        self._jobs = jobs
        self._max_len = max_len
        self._rows: set[int] = set()
        self.turns, self._slots_per_chunk = regions.views.shared.owner.shape
        self.num_chunks = 0
        self.plan: StepPlan | None = None

    @property
    def rows(self) -> list[int]:
        """Rows that decode."""
        return sorted(self._rows)

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

    def add(self, row: int) -> None:
        """From the next step on `row` decodes."""
        self._rows.add(row)
        self.outdate()

    def drop(self, row: int) -> None:
        """`row` decodes no more, if it did, and its slots are free."""
        self._rows.discard(row)
        self.outdate()

    def outdate(self) -> None:
        """The placement, or the rows that decode, have changed."""
        self.plan = None

    def prepare(self) -> None:
        """Makes room for a token in every row, and brings plan and operands up to date.

        Raises:
            CapacityError: a row cannot take another token.
        """
        if self._evictions.settle():
            self.outdate()
        for row in self.rows:
            self._make_room(row)
        if self.plan is None:
            views = self._regions.views
            self._regions.views = dataclasses.replace(views, shared=self._refresh(views.shared))

    def _make_room(self, row: int) -> None:
        if self._placement.rows[row].length >= self._max_len:
            raise CapacityError(
                f"max_len: row {row} holds {self._max_len} tokens, all that it may; release it, or make a larger cache"
            )
        if self._placement.window_length(row) < self._regions.views.spec.capacity:
            return
        self._evictions.make_room(row)
        self.outdate()

    def _refresh(self, shared: Shared) -> Shared:
        """Rebuilds the plan; returns `shared` with the operands that go with it."""
        placement, rows = self._placement, range(len(self._placement.rows))
        spans: list[tuple[int, int]] = []
        owner = np.zeros((0, 0), np.int32)
        if self._slots_per_chunk:
            owner, spans = chunk_table(placement, self.rows, self._slots_per_chunk)
            self.turns = max(self.turns, turn_bucket(len(spans)))
            surplus = np.full((self.turns - len(spans), self._slots_per_chunk), -1, np.int32)
            owner = np.concatenate([owner, surplus])
        self.num_chunks = len(spans)
        self.plan = decode_plan(
            self._jobs,
            [placement.table(r, Region.UNPINNED) if r in self._rows else [] for r in rows],
            spans,
            self.turns,
            uses_host=self._regions.views.spec.uses_host,
            uses_link=self._slots_per_chunk > 0,
        )
        return shared._replace(
            owner=jnp.array(owner),
            start=jnp.array([placement.window_start(r) for r in rows], jnp.int32),
            length=jnp.array([placement.rows[r].length for r in rows], jnp.int32),
            active=jnp.array([r in self._rows for r in rows], bool),
        )
