"""The three policies that need no roofline: everything over the link, everything on the CPU, everything resident."""

import dataclasses

from wscope_jax.layout import Region
from wscope_jax.placement import Occupancy
from wscope_jax.roofline import StepTiming
from wscope_jax.schedules import IN_ORDER, Schedule


@dataclasses.dataclass(frozen=True)
class GpuOnly:
    """All placed blocks are PINNED and streamed: r = 0."""

    schedule: Schedule = IN_ORDER
    name: str = "gpu_only"
    exact: bool = True
    uses_host: bool = False
    uses_link: bool = True

    def cpu_share(self, num_placed: int) -> float:
        """Always 0."""
        del num_placed
        return 0.0

    def route(self, occupancy: Occupancy) -> Region | None:
        """PINNED, or nothing: this policy's programs cannot read UNPINNED."""
        return Region.PINNED if occupancy.pinned_room else None

    def observe(self, timing: StepTiming) -> "GpuOnly":
        """Nothing to learn."""
        del timing
        return self


@dataclasses.dataclass(frozen=True)
class CpuOnly:
    """All placed blocks are UNPINNED and attended by the CPU: r = 1."""

    schedule: Schedule = IN_ORDER
    name: str = "cpu_only"
    exact: bool = True
    uses_host: bool = True
    uses_link: bool = False

    def cpu_share(self, num_placed: int) -> float:
        """Always 1."""
        del num_placed
        return 1.0

    def route(self, occupancy: Occupancy) -> Region | None:
        """UNPINNED, or nothing: this policy's programs cannot read PINNED."""
        return Region.UNPINNED if occupancy.unpinned_room else None

    def observe(self, timing: StepTiming) -> "CpuOnly":
        """Nothing to learn."""
        del timing
        return self


@dataclasses.dataclass(frozen=True)
class Resident:
    """Nothing is ever placed: the window holds the whole sequence and programs have no host or link call."""

    schedule: Schedule = IN_ORDER
    name: str = "resident"
    exact: bool = True
    uses_host: bool = False
    uses_link: bool = False

    def cpu_share(self, num_placed: int) -> float:
        """Always 0."""
        del num_placed
        return 0.0

    def route(self, occupancy: Occupancy) -> Region | None:
        """Never asked: a window of full length never has a block to give away."""
        raise ValueError(f"route: the resident policy places nothing, got {occupancy}")

    def observe(self, timing: StepTiming) -> "Resident":
        """Nothing to learn."""
        del timing
        return self
