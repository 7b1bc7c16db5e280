"""The cost model that sets the share of the CPU: equations 1 and 2, fed back by measurement.

Pure numbers in, pure numbers out. A policy asks `Roofline.cpu_share`; the engine feeds what each
step took to `Roofline.observe`. Nothing here is a constant of a machine: costs come from
calibration and are then followed.
"""

import dataclasses
import math
import statistics
from typing import Final

from wscope_jax.arguments import instance, number, real

LEAST_COST_S: Final = 1e-13  # per entry; no memory is so fast, a clock is wrong
MOST_COST_S: Final = 10.0  # per entry and for a fixed cost; above it likewise
MOST_JOB_S: Final = 60.0  # a longer job is a suspended machine or a debugger, not a measurement
MOST_COUNT: Final = 2**63  # of entries or jobs; more are no count
NUM_SAMPLES: Final = 5  # their median ignores two preempted workers in a row
WEIGHT: Final = 0.15  # of the median in the moving average: half-way in four observations
MOST_CHANGE: Final = 1.2  # factor by which one observation may change a cost
LEAST_SIGNAL: Final = 0.25  # of a time beyond the fixed cost, or it tells nothing of the entries
SETTLED: Final = 0.03  # logarithm; while an observation changes a cost by more, waits say no more
NUDGE_WEIGHT: Final = 0.05  # hand-over changes little, and the waits of one step say little
NUDGE_LIMIT: Final = 0.7  # logarithm; the waits may correct A : B by a factor of two
MOST_NUDGE: Final = 1.0  # a little beyond, for rounding
LEAST_SHARE: Final = 0.01  # nearer to 0 or 1, odds say nothing of a cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTiming:
    """What one step (or one burst) took, summed over its jobs.

    A job is one layer's pair of host and device work.

    Attributes:
        cpu_ns: from the first worker's start to the last one's end.
        link_ns: the link (on a machine without a GPU: the device's part of attention) was busy.
        link_idle_ns: the link stood still, for its slots were full; infinite, nobody knows.
        wait_cpu_ns: the device stood still for the CPU.
        wait_link_ns: the finished CPU part lay waiting for the device.
        host_entries: entries that the CPU attended to.
        streamed_entries: entries that went over the link.
        jobs: number of such pairs.

    Raises:
        UsageError: One of them is no number. `Roofline.observe` ignores numbers that no step can have taken or read.
    """

    cpu_ns: float
    link_ns: float
    link_idle_ns: float = math.inf
    wait_cpu_ns: float
    wait_link_ns: float
    host_entries: int
    streamed_entries: int
    jobs: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            real(field.name, getattr(self, field.name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Costs of attending to placed entries on either side; all times are per layer.

    Attributes:
        cpu_s_per_entry: A in equation 1, seconds.
        link_s_per_entry: B in equation 1, seconds.
        cpu_fixed_s: C_CPU in equation 1, seconds.
        link_fixed_s: C_GPU in equation 1, seconds.
        nudge: logarithm of the factor by which the waits have corrected A : B beyond what the times
            say; contained in A and B already. Above 0, the CPU's part comes later than it is long.
        cpu_samples: the newest measured values of A, before the nudge.
        link_samples: the newest measured values of B, before the nudge.
        nudge_samples: the newest values that the waits asked for.

    Raises:
        UsageError: If a cost is not a number in its range.

    Source: the paper's roofline performance model.
    """

    cpu_s_per_entry: float
    link_s_per_entry: float
    cpu_fixed_s: float = 0.0
    link_fixed_s: float = 0.0
    nudge: float = 0.0
    cpu_samples: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    link_samples: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    nudge_samples: tuple[float, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, least in (
            ("cpu_s_per_entry", LEAST_COST_S),
            ("link_s_per_entry", LEAST_COST_S),
            ("cpu_fixed_s", 0.0),
            ("link_fixed_s", 0.0),
        ):
            number(name, getattr(self, name), least, MOST_COST_S)
        number("nudge", self.nudge, -MOST_NUDGE, MOST_NUDGE)
        for name, least, most in (
            ("cpu_samples", 0.0, MOST_COST_S),
            ("link_samples", 0.0, MOST_COST_S),
            ("nudge_samples", -MOST_NUDGE, MOST_NUDGE),
        ):
            instance(name, samples := getattr(self, name), tuple, "a tuple of numbers")
            for sample in samples:
                number(name, sample, least, most)

    def cpu_share(self, num_placed: float) -> float:
        """The share r at which CPU and link take equally long.

        With nothing placed the equation has no value; its limit for ever fewer entries is returned:
        all to the side with the smaller fixed cost, B / (A + B) if these are equal.

        Args:
            num_placed: L, placed entries of all rows in one layer.

        Returns:
            r in [0, 1].

        Raises:
            UsageError: If `num_placed` is negative or not a number.

        Source: equation 2.
        """
        num_placed = number("num_placed", num_placed, 0.0, math.inf)
        both = self.cpu_s_per_entry + self.link_s_per_entry
        share = self.link_s_per_entry / both
        head_start = self.link_fixed_s - self.cpu_fixed_s
        if num_placed > 0:
            share += head_start / (both * num_placed)
        elif head_start != 0:
            share = math.copysign(math.inf, head_start)
        return min(1.0, max(0.0, share))

    def cpu_time(self, share: float, num_placed: int) -> float:
        """Seconds that the CPU takes per layer for its share. Source: equation 1."""
        return share * self.cpu_s_per_entry * num_placed + self.cpu_fixed_s

    def link_time(self, share: float, num_placed: int) -> float:
        """Seconds that the link takes per layer for the rest. Source: equation 1."""
        return (1 - share) * self.link_s_per_entry * num_placed + self.link_fixed_s

    def observe(self, timing: StepTiming) -> "Roofline":
        """The model after a step was timed.

        A and B follow the median of their newest measured values. One observation changes either by
        a factor of `MOST_CHANGE` (the waits move them only while it is much less), and the share of
        what was timed by 0.4 at most. A time that cannot be one (zero, negative, not a number,
        absurdly long or short) leaves the values of its side as they were. A side without entries
        is not measured, but is not lost either: unless its fixed cost forbids it, no share is
        exactly 0 or 1, so routing gives each side a block now and then.
        """
        instance("timing", timing, StepTiming, "a StepTiming")
        half = math.exp(self.nudge / 2)
        cpu = _Cost(self.cpu_s_per_entry / half, self.cpu_fixed_s, self.cpu_samples)
        link = _Cost(self.link_s_per_entry * half, self.link_fixed_s, self.link_samples)
        new_cpu = cpu.after(timing.cpu_ns, timing.host_entries, timing.jobs)
        new_link = link.after(timing.link_ns, timing.streamed_entries, timing.jobs)
        changes = (new_cpu.per_entry / cpu.per_entry, new_link.per_entry / link.per_entry)
        nudge, nudges = self.nudge, self.nudge_samples
        if all(abs(math.log(change)) <= SETTLED for change in changes):
            wanted = self._wanted_nudge(timing, new_cpu, new_link)
            if wanted is not None:
                nudges = (*(nudges or (nudge,) * NUM_SAMPLES)[1:], wanted)
                nudge += NUDGE_WEIGHT * (statistics.median(nudges) - nudge)
        # Ratios, so that what did not change keeps its very bits.
        step = math.exp((nudge - self.nudge) / 2)
        return Roofline(
            cpu_s_per_entry=_clip(self.cpu_s_per_entry * (changes[0] * step)),
            link_s_per_entry=_clip(self.link_s_per_entry * (changes[1] / step)),
            cpu_fixed_s=new_cpu.fixed,
            link_fixed_s=new_link.fixed,
            nudge=nudge,
            cpu_samples=new_cpu.samples,
            link_samples=new_link.samples,
            nudge_samples=nudges,
        )

    def _wanted_nudge(self, timing: StepTiming, cpu: "_Cost", link: "_Cost") -> float | None:
        """The nudge that the waits ask for beside the measured costs; None if they say nothing.

        By how much later than the device's part the CPU's came tells how far the placed share is
        from balance; how far it should be, the costs tell. The difference is hand-over, which the
        times do not show. A device that stands still for the CPU tells more than that: meanwhile
        the link copies ahead for later layers. A link that stands still does so when the device is
        busy with something else, too. So the CPU is as late as the lesser of the two.
        """
        idle_ns = timing.wait_cpu_ns if timing.link_idle_ns == math.inf else timing.link_idle_ns
        times = (timing.cpu_ns, timing.link_ns, idle_ns, timing.wait_cpu_ns, timing.wait_link_ns)
        if not (
            all(_is_time(time_ns, timing.jobs) for time_ns in times)
            and min(timing.cpu_ns, timing.link_ns) > 0
            and max(timing.wait_cpu_ns, timing.wait_link_ns) > 0  # or nobody has measured them
            and _is_count(timing.host_entries)
            and _is_count(timing.streamed_entries)
        ):
            return None
        placed = timing.host_entries + timing.streamed_entries
        measured = Roofline(
            cpu_s_per_entry=_clip(cpu.per_entry),
            link_s_per_entry=_clip(link.per_entry),
            cpu_fixed_s=cpu.fixed,
            link_fixed_s=link.fixed,
        )
        both_s = (measured.cpu_s_per_entry + measured.link_s_per_entry) * placed
        late_s = 1e-9 * (min(idle_ns, timing.wait_cpu_ns) - timing.wait_link_ns)
        wanted = _log_odds(measured.cpu_share(placed // timing.jobs)) - _log_odds(
            timing.host_entries / placed - late_s / both_s
        )
        return min(NUDGE_LIMIT, max(-NUDGE_LIMIT, wanted))


def _log_odds(share: float) -> float:
    share = min(1 - LEAST_SHARE, max(LEAST_SHARE, share))
    return math.log(share / (1 - share))


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Measured cost of one side, in seconds: per entry, fixed per job, newest samples per entry."""

    per_entry: float
    fixed: float
    samples: tuple[float, ...]

    def after(self, time_ns: float, entries: int, jobs: int) -> "_Cost":
        """The cost after `jobs` jobs over `entries` entries in all took `time_ns`."""
        if not (_is_time(time_ns, jobs) and _is_count(entries)):
            return self
        time_s = time_ns * 1e-9
        if not LEAST_COST_S <= time_s / entries <= MOST_COST_S:
            return self
        if time_s / jobs < self.fixed:
            # No job is shorter than its fixed cost, so that was measured too high. The step is one of
            # the entries' own time, because the share turns on that.
            step_s = (MOST_CHANGE - 1) * self.per_entry * entries / jobs
            return dataclasses.replace(self, fixed=max(time_s / jobs, self.fixed - step_s))
        beyond_s = time_s - jobs * self.fixed
        if beyond_s < LEAST_SIGNAL * time_s:
            return self
        recent = (self.samples or (_clip(self.per_entry),) * NUM_SAMPLES)[1:]
        samples = (*recent, _clip(beyond_s / entries))
        change = (statistics.median(samples) / self.per_entry) ** WEIGHT
        change = min(MOST_CHANGE, max(1 / MOST_CHANGE, change))
        return _Cost(self.per_entry * change, self.fixed, samples)


def _is_time(time_ns: float, jobs: int) -> bool:
    """Whether `jobs` jobs can have taken, or waited, so long; false for what is not a number."""
    return _is_count(jobs) and 0 <= time_ns <= MOST_JOB_S * 1e9 * jobs


def _is_count(number: float) -> bool:
    return 0 < number <= MOST_COUNT


def _clip(cost_s: float) -> float:
    return min(MOST_COST_S, max(LEAST_COST_S, cost_s))
