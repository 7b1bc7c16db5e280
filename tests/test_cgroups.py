"""Folders of control groups, from made-up proc trees."""

from pathlib import Path

import pytest

from wscope_jax import cgroups


@pytest.mark.parametrize(
    ("membership", "expected"),
    [
        ("0::/a/b\n", ["a/b", "a", "."]),
        ("0::/\n", ["."]),
        ("0::/../../other\n", ["."]),
        ("3:cpu:/x\n4:memory:/y\n", ["memory/y", "memory"]),
        ("4:hugetlb,memory:/y\n", ["hugetlb,memory/y", "hugetlb,memory", "memory/y", "memory"]),
        ("4:memory:/y\n0::/z\n", ["memory/y", "memory", "z", "."]),
        ("5:memory_pressure:/y\n", []),
        ("", []),
    ],
)
def test_folders(tmp_path: Path, membership: str, expected: list[str]) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(membership)
    got = cgroups.folders("memory", tmp_path, Path("/c"))
    assert got == [Path("/c") / name for name in expected]


def test_without_proc(tmp_path: Path) -> None:
    assert cgroups.folders("cpu", tmp_path) == []
