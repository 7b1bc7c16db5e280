"""What CPU and link did in the steps of a run, and which of them set the pace."""

import dataclasses
from typing import Final

from wscope_jax.roofline import StepTiming

LATE: Final = 0.05  # of the time; a side that is waited for less than that does not set the pace
# Of the time: a link that copies for longer leaves room for nothing else.
BUSY: Final = 0.8


@dataclasses.dataclass(frozen=True)
class Work:
    """Sums over the steps that were timed; times in seconds.

    Attributes:
        steps: how many they are; the newest may not be among them yet.
        cpu_s: the workers attended to UNPINNED.
        link_s: PINNED was copied to the device (on a machine without a GPU: the device's part of attention).
        wait_cpu_s: the device stood still for the workers.
        wait_link_s: the workers' results lay waiting for the device: for the link, or for its own work.
        host_entries: entries that the workers attended to, over all layers.
        streamed_entries: entries that were copied, over all layers.
    """

    steps: int = 0
    cpu_s: float = 0.0
    link_s: float = 0.0
    wait_cpu_s: float = 0.0
    wait_link_s: float = 0.0
    host_entries: int = 0
    streamed_entries: int = 0

    def after(self, timing: StepTiming) -> "Work":
        """The sums with one more step."""
        return Work(
            steps=self.steps + 1,
            cpu_s=self.cpu_s + 1e-9 * timing.cpu_ns,
            link_s=self.link_s + 1e-9 * timing.link_ns,
            wait_cpu_s=self.wait_cpu_s + 1e-9 * timing.wait_cpu_ns,
            wait_link_s=self.wait_link_s + 1e-9 * timing.wait_link_ns,
            host_entries=self.host_entries + timing.host_entries,
            streamed_entries=self.streamed_entries + timing.streamed_entries,
        )

    def limit(self, took_s: float) -> str:
        """What set the pace of steps that took `took_s` in all: "cpu", "link" or "device"."""
        if self.wait_cpu_s >= max(self.wait_link_s, LATE * took_s) > 0:
            return "cpu"
        is_late = self.wait_link_s >= LATE * took_s and self.link_s >= self.cpu_s
        if self.streamed_entries > 0 and (is_late or self.link_s >= BUSY * took_s):
            return "link"
        return "device"
