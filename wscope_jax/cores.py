"""How many cores this process may use, and who gets which share of them.

A container often sees all cores of its host and may use two: threads beyond that wait for each
other. Two things bound a process, its affinity mask and its cgroup's quota of CPU time; the smaller
one counts.
"""

import os
from pathlib import Path
from typing import NamedTuple

from wscope_jax import cgroups
from wscope_jax.cgroups import CGROUP, PROC


class Share(NamedTuple):
    """Threads of the two pools that work at the same time.

    Attributes:
        workers: Threads of the worker pool that attends to the host regions.
        xla: Threads of XLA's own CPU pool.
    """

    workers: int
    xla: int


def available(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Whole cores that this process may keep busy, by affinity and cgroup quota; at least 1.

    Args:
        proc: The mounted proc file system.
        cgroup: The mounted cgroup file system (version 1 or 2).
    """
    cores = len(os.sched_getaffinity(0))
    quota = quota_cores(proc, cgroup)
    # Rounded down: with one thread more than the quota allows, all of them are stopped together for
    # the rest of each period.
    return max(1, cores if quota is None else min(cores, int(quota)))


def split(cores: int, *, gpu: bool = False, threads: int | None = None) -> Share:
    """Divides cores between the workers and XLA.

    Without a GPU each gets half (XLA the larger one): both compute at the same time. With a GPU the
    workers get all cores but one, which feeds the link.

    Args:
        cores: Cores there are, as `available` counts them.
        gpu: Whether XLA computes on a GPU.
        threads: Workers the user asked for, None to choose. More than `cores` is honoured.
    """
    workers = threads if threads is not None else (cores - 1 if gpu else cores // 2)
    workers = max(1, workers)
    return Share(workers=workers, xla=max(1, cores - workers))


def quota_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """CPU time, in cores, that the cgroups of this process grant; None without a limit.

    Args:
        proc: The mounted proc file system.
        cgroup: The mounted cgroup file system (version 1 or 2).
    """
    limits = map(_limit, cgroups.folders("cpu", proc, cgroup))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """Cores that one group grants, by the files of version 2 or 1; None without a limit."""
    unified = _words(group / "cpu.max")
    if len(unified) == 2:
        return _ratio(unified[0], unified[1])
    quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
    if len(quota) == 1 and len(period) == 1:
        return _ratio(quota[0], period[0])
    return None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _ratio(quota: str, period: str) -> float | None:
    """Quota over period; None for "max", for -1 and for anything else that is no limit."""
    try:
        ratio = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return ratio if ratio > 0 else None
