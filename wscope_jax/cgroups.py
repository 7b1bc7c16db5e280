"""The control groups that may bound this process, as folders of the mounted cgroup file system."""

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


def folders(controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """Folders of this process's groups and of all groups above them, whose limits hold for it, too.

    Inside a container a path may name a group of the host that is not mounted here: a folder may be missing.

    Args:
        controller: "cpu" or "memory"; version 1 has a tree for each, version 2 one for all.
        proc: the mounted proc file system.
        cgroup: the mounted cgroup file system (version 1 or 2).
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        controllers, _, name = line.partition(":")[2].partition(":")
        path = Path(name.lstrip("/"))
        if ".." in path.parts:  # a group outside this cgroup namespace
            path = Path()
        if not controllers:
            bases = [cgroup]
        elif controller in controllers.split(","):
            bases = [cgroup / controllers, cgroup / controller]
        else:
            continue
        found += [base / group for base in bases for group in (path, *path.parents)]
    return list(dict.fromkeys(found))
