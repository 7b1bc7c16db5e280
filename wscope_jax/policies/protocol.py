"""What a policy is: it sees integers and floats only, and decides where the next full block goes."""

from typing import Protocol

from wscope_jax.layout import Region
from wscope_jax.placement import Occupancy
from wscope_jax.roofline import StepTiming
from wscope_jax.schedules import Schedule


class Policy(Protocol):
    """Placement and schedule of one way to serve a cache that does not fit; a frozen dataclass."""

    @property
    def name(self) -> str:
        """Key in `policies.BY_NAME`."""
        ...

    @property
    def exact(self) -> bool:
        """The policy attends to every entry, so tokens equal those of full attention."""
        ...

    @property
    def uses_host(self) -> bool:
        """Programs attend to UNPINNED."""
        ...

    @property
    def uses_link(self) -> bool:
        """Programs stream PINNED."""
        ...

    @property
    def schedule(self) -> Schedule:
        """How a step chains the model's functions."""
        ...

    def cpu_share(self, num_placed: int) -> float:
        """The share r in [0, 1] of `num_placed` placed entries (one layer, all rows) that is the CPU's."""
        ...

    def route(self, occupancy: Occupancy) -> Region | None:
        """Host region of the next full block of a row, or None if nothing has room.

        One that has room: `Occupancy.has_room`; `Occupancy.fits` gives the other one where the wanted one has none.
        """
        ...

    def observe(self, timing: StepTiming) -> "Policy":
        """The policy after a step was timed."""
        ...
