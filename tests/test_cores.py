"""The core count, on made-up proc and cgroup trees."""

import os
from pathlib import Path

import pytest

from wscope_jax import cores


def tree(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Writes a proc and a cgroup tree; returns their roots."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        file = cgroup / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, cgroup


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "200000 100000\n"}, 1.0),
        # the path names a group of the host; here its group is the mount point itself
        ("0::/host/only\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/../../other\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "4:cpu,cpuacct:/x\n1:name=systemd:/\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("4:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "50000"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {"cpu.max": "5 0"}, None),
        ("nonsense", {}, None),
        ("", {}, None),
    ],
)
def test_quota(tmp_path: Path, membership: str, files: dict[str, str], quota: float | None) -> None:
    assert cores.quota_cores(*tree(tmp_path, membership, files)) == quota


def test_quota_without_proc(tmp_path: Path) -> None:
    assert cores.quota_cores(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("mask", "limit", "expected"),
    [(8, "max 100000", 8), (8, "250000 100000", 2), (2, "800000 100000", 2), (4, "1000 100000", 1)],
)
def test_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int, limit: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(mask)))
    assert cores.available(*tree(tmp_path, "0::/\n", {"cpu.max": limit})) == expected


def test_available_here() -> None:
    assert 1 <= cores.available() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("number", "gpu", "threads", "expected"),
    [
        (1, False, None, (1, 1)),
        (2, False, None, (1, 1)),
        (3, False, None, (1, 2)),
        (8, False, None, (4, 4)),
        (8, True, None, (7, 1)),
        (1, True, None, (1, 1)),
        (8, False, 2, (2, 6)),
        (2, False, 5, (5, 1)),
        (8, False, 0, (1, 7)),
    ],
)
def test_split(number: int, gpu: bool, threads: int | None, expected: tuple[int, int]) -> None:
    assert cores.split(number, gpu=gpu, threads=threads) == expected
