"""The small files of a checkpoint directory, and how its faults are told."""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from wscope_jax.arguments import shown
from wscope_jax.errors import CheckpointError, UsageError
from wscope_jax.strict_json import parse_object

MAX_JSON_BYTES: Final = 16 << 20  # config.json and its like are some kB
SHOWN: Final = 20  # problems listed in one message; the rest is counted
MAX_NAME_BYTES: Final = 255  # longest file name that Linux knows
LFS_POINTER: Final = b"version https://git-lfs"  # how a file begins that Git LFS has not fetched


class Problems:
    """Collects what is wrong with a checkpoint, to tell it at once.

    Attributes:
        where: file or directory that the report begins with.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self._found: dict[str, list[str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, text: str) -> None:
        """Notes one problem, one line; problems of one kind are counted together."""
        self._counts[kind] += 1
        found = self._found.setdefault(kind, [])
        if len(found) < SHOWN:
            found.append(text)

    def check(self, remedy: str) -> None:
        """Raises what was found, rare kinds first.

        Raises:
            CheckpointError: There is at least one problem.
        """
        total = self._counts.total()
        kinds = sorted(self._counts, key=lambda kind: self._counts[kind])
        texts = [text for kind in kinds for text in self._found[kind]][:SHOWN]
        if total == 1:  # where the text names its file itself, that is enough
            where = "" if texts[0].startswith(f"{self.where}") else f"{self.where}: "
            raise CheckpointError(f"{where}{texts[0]}; {remedy}")
        if total:
            counts = ", ".join(f"{kind}: {self._counts[kind]}" for kind in kinds)
            texts += [f"... and {total - len(texts)} more"] * (total > len(texts))
            lines = "".join(f"\n  {text}" for text in texts)
            raise CheckpointError(f"{self.where}: {total} problems ({counts}); {remedy}{lines}")


def show(value: object) -> str:
    """A value out of a checkpoint as one short line of ASCII, whatever it holds."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def require_path(name: str, given: Any) -> None:
    """Raises UsageError for what is no path; a number would be taken for an open file."""
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"{name}: expected the path of a checkpoint, got {shown(given)}")


def unreadable(path: Path | str, error: Exception) -> CheckpointError:
    """What the system, or Python, said when a file was to be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError(f"{path}: cannot be read: {reason}; check the file and who may read it")


def open_directory(directory: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint directory.

    Raises:
        UsageError: It is no path.
        CheckpointError: It is missing, unreadable or not a directory.
    """
    require_path("directory", directory)
    path = Path(directory)
    if "\0" in str(path):
        raise CheckpointError(f"{show(str(path))}: no path; name the folder that holds config.json")
    try:
        if path.is_dir():
            os.listdir(path)
            return path
        exists = path.exists()
        near = sorted(str(config.parent) for config in path.parent.glob("*/config.json"))[:5]
    except OSError as error:
        raise unreadable(path, error) from None
    what = "not a directory" if exists else "no such directory"
    hint = f"; beside it are {', '.join(near)}" if near else ""
    raise CheckpointError(f"{path}: {what}; name the folder that holds config.json{hint}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within the block a refusal by the system names the file, or `path` where it does not say which.

    Raises:
        CheckpointError: The system refused something.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(error.filename or path, error) from None
    except RuntimeError as error:  # what Python before 3.13 raises for a link that leads to itself
        raise unreadable(path, error) from None


def locate(root: Path, name: str) -> Path | None:
    """The path of a file of the checkpoint in `root`, or None if there is none; opens nothing.

    Raises:
        CheckpointError: `name` is no plain file name; or the file cannot be looked at, is no regular
            file, or a link that leaves the directory (a hub's cache, which keeps every snapshot as links to the
            blobs folder beside it, is allowed).
    """
    plain = name not in ("", ".", "..") and not any(c in name for c in "/\\")
    if not plain or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise CheckpointError(
            f"{root}: the file name {show(name)} is refused; a checkpoint's files lie in its folder"
        )
    with naming(root / name):
        return _locate(root, root / name)


def _locate(root: Path, path: Path) -> Path | None:
    home, target = root.resolve(), path.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(target.is_relative_to(folder) for folder in (home, *blobs)):
        raise CheckpointError(
            f"{path}: links to a file outside of {root}; put the file itself there"
        )
    if not target.exists():
        return None
    if not stat.S_ISREG(target.stat().st_mode):
        raise CheckpointError(f"{path}: not a regular file; put the file itself there")
    return path


def refuse_pointer(path: Path, head: bytes) -> None:
    """Checks that `head`, the first bytes of a file, are not those of a Git LFS pointer.

    Raises:
        CheckpointError: They are.
    """
    if head.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
        )


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """The object that `raw`, bytes of the file `path`, spells in JSON.

    Raises:
        CheckpointError: It is not UTF-8, not JSON, nested too deeply, no object, or holds a key
            twice or a number that is not finite.
    """
    try:
        return parse_object(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; save it as UTF-8") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        CheckpointError: The file cannot be read, is larger, or a Git LFS pointer.
    """
    with naming(path), open(path, "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise CheckpointError(f"{path}: larger than {limit >> 20} MiB; no such file is")
    refuse_pointer(path, raw)
    return raw


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes.

    Raises:
        CheckpointError: As `read_bytes` and `parse_json`.
    """
    return parse_json(path, read_bytes(path, limit))
