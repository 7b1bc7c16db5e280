"""WriteScope: CPU and link work at once, and each full block goes where the roofline model says."""

import dataclasses
import math
from typing import Final

from wscope_jax.arguments import number, shown
from wscope_jax.errors import UsageError
from wscope_jax.layout import Region
from wscope_jax.placement import Occupancy
from wscope_jax.roofline import Roofline, StepTiming
from wscope_jax.schedules import IN_ORDER, Schedule

UNCERTAIN: Final = 0.15  # logarithm by which A : B may move until a placed prompt is decoded


@dataclasses.dataclass(frozen=True)
class WriteScope:
    """Write-time routing by a share r that is fed back by measurement, or fixed.

    Attributes:
        share: r in [0, 1], or None to take it from the roofline model.
        roofline: measured costs of CPU and link; updated by `observe`.
        schedule: how a step is chained.

    Raises:
        UsageError: `share` is out of range, or `roofline` is none.

    Source: the paper's batched write-time routing and equation 2.
    """

    share: float | None = None
    roofline: Roofline | None = None
    schedule: Schedule = IN_ORDER
    name: str = "write_scope"
    exact: bool = True
    uses_host: bool = True
    uses_link: bool = True

    def __post_init__(self) -> None:
        if self.share is not None:
            object.__setattr__(self, "share", number("share", self.share, 0.0, 1.0))
        if not isinstance(self.roofline, Roofline | None):
            raise UsageError(f"roofline: expected a Roofline or None, got {shown(self.roofline)}")

    def cpu_share(self, num_placed: int) -> float:
        """The fixed share, or that of equation 2 leaning to who may be late; one half while nothing was measured.

        What is placed stays while A and B move on, so one of the sides will be late. An entry too many then costs A if
        it is the CPU, B if it is the link. With fixed costs left out r is B / (A + B), so the CPU should be the late
        one with probability r; the lean is that quantile of an error that is even within ± `UNCERTAIN`. (A link that
        has ended leaves the CPU its memory, so where both want all of that a late CPU costs even less.)
        """
        if self.share is not None:
            return self.share
        if self.roofline is None:
            return 0.5
        r = self.roofline.cpu_share(num_placed)
        lean = math.exp(UNCERTAIN * (2 * r - 1))
        return min(1.0, lean * r / (lean * r + 1 - r))

    def route(self, occupancy: Occupancy) -> Region | None:
        """UNPINNED while the batch's share is below r, but no row's own share leaves r by more than a block."""
        placed = max(occupancy.batch_blocks + 1, occupancy.expected_blocks)
        r = self.cpu_share(placed * occupancy.block)
        wanted = (
            Region.UNPINNED
            if occupancy.batch_unpinned < r * (occupancy.batch_blocks + 1)
            else Region.PINNED
        )
        row_target = r * (occupancy.row_blocks + 1)
        if occupancy.row_unpinned + 1 > row_target + 1:
            wanted = Region.PINNED
        elif occupancy.row_unpinned < row_target - 1:
            wanted = Region.UNPINNED
        return occupancy.fits(wanted)

    def observe(self, timing: StepTiming) -> "WriteScope":
        """Feeds a step's timing back into the roofline model, unless the share is fixed."""
        if self.share is not None or self.roofline is None:
            return self
        return dataclasses.replace(self, roofline=self.roofline.observe(timing))
