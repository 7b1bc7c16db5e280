"""Makes `.venv` in the repository root; where it is up to date already, does nothing.

    python3 tools/setup_env.py [--lint]

Chooses a Python that runs and is recent enough, makes a virtual environment, builds the extension
and installs the package into it (editable, with what the tests need; `--lint` adds the linters). A
stamp of all that went into it decides whether there is anything to do. PYTHON names another
interpreter.

Needs nothing but the standard library, and itself runs on Python 3.7 and later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "wscope-stamp.json"
OLDEST, NEWEST = (3, 11), (3, 14)
# `python3` first: whoever set it up meant it. Then the versions with the longest record here.
NAMES = ("python3", "python3.13", "python3.12", "python3.11", "python3.14")
PROBE = """
import json, os, sys, sysconfig
try:
    import ensurepip, venv
    lacks = None
except ImportError:
    lacks = "the venv module (Debian, Ubuntu: apt install python3-venv)"
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    lacks = lacks or "its C headers (Debian, Ubuntu: apt install python3-dev)"
print(json.dumps({"version": sys.version_info[:3], "lacks": lacks}))
"""
EXIT_ENVIRONMENT = 5


class SetupError(Exception):
    """What is missing on this machine, and what to do, in one line."""


def main() -> int:
    """Sets up what is not set up yet; returns the exit code."""
    extras = ["test", "lint"] if "--lint" in sys.argv[1:] else ["test"]
    try:
        wanted = fingerprint()
        done = read_stamp()
        if done is None or done["fingerprint"] != wanted or not set(extras) <= set(done["extras"]):
            known = [] if done is None else done["extras"]
            install(wanted, sorted({*extras, *known}))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def install(wanted: str, extras: list[str]) -> None:
    """Makes the environment unless there is one that works, builds, installs and stamps."""
    require_compiler()
    version = None if asked_python() else usable_venv()
    if STAMP.exists():
        STAMP.unlink()
    if version is None:
        python, version = find_python()
        say(f"making .venv with {python} ({dotted(version)})")
        call([python, "-m", "venv", "--clear", str(VENV)], "could not make .venv, see above")
    say("building the extension and installing (once; some minutes)")
    pip = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
    ]
    call(
        [*pip, "-e", f".[{','.join(extras)}]"],
        "installing failed for the reason above; it needs a package index and a C++17 compiler",
    )
    stamp = {"fingerprint": wanted, "extras": extras, "python": asked_python()}
    STAMP.write_text(json.dumps(stamp))


def asked_python() -> str:
    """The interpreter that PYTHON names, "" for none; `.venv`'s own is no choice of another one."""
    asked = os.environ.get("PYTHON", "")
    return "" if asked and VENV in Path(asked).absolute().parents else asked


def fingerprint() -> str:
    """A digest of all that `.venv` is made from, its place included: a moved one does not work."""
    digest = hashlib.sha256(str(ROOT).encode())
    files = [ROOT / "pyproject.toml", Path(__file__).resolve()]
    files += sorted(file for file in (ROOT / "ffi").rglob("*") if file.is_file())
    for file in files:
        digest.update(f"\0{file.relative_to(ROOT)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict[str, Any] | None:
    """What `.venv` was made from; None if it is absent, broken, or of another PYTHON than asked."""
    try:
        stamp = json.loads(STAMP.read_text())
        is_there = all((VENV / "bin" / name).exists() for name in ("python", "wscope"))
        asked = asked_python() or stamp["python"]
        is_whole = isinstance(stamp["fingerprint"], str) and isinstance(stamp["extras"], list)
        return stamp if is_there and is_whole and asked == stamp["python"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def usable_venv() -> tuple[int, ...] | None:
    """The version of `.venv`'s interpreter if it runs, is recent enough and has pip, else None."""
    python = str(VENV / "bin" / "python")
    probed = probe(python)
    if probed is None or not OLDEST <= probed[0][:2] <= NEWEST:
        return None
    has_pip = (
        subprocess.run([python, "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0
    )
    return probed[0] if has_pip else None


def find_python() -> tuple[str, tuple[int, ...]]:
    """The interpreter to use and its version.

    Candidates are run, not just looked for: a shim on PATH may stand for nothing.

    Raises:
        SetupError: If there is none, with what was found instead.
    """
    chosen = asked_python()
    found = []
    for candidate in [chosen] if chosen else candidates():
        probed = probe(candidate)
        if probed is None:
            continue
        version, lacks = probed
        name = dotted(version) if chosen else f"{dotted(version)} at {candidate}"
        if not OLDEST <= version[:2] <= NEWEST:
            found.append(name)
        elif lacks is not None:
            found.append(f"{name} without {lacks}")
        else:
            return candidate, version
    wanted = f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if chosen:
        got = f"PYTHON={chosen} " + (f"is Python {found[0]}" if found else "does not run")
    else:
        got = "found " + ("; ".join(found) if found else "none")
    raise SetupError(f"needs {wanted}; {got}; install one or set PYTHON=/path/to/python3")


def candidates() -> list[str]:
    """Every interpreter on PATH that goes by one of NAMES, by name first, then in PATH's order.

    An activated `.venv` is none of them: it is what gets replaced.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    folders = [folder for folder in folders if folder and Path(folder) != VENV / "bin"]
    paths = [str(Path(folder) / name) for name in NAMES for folder in folders]
    return list(dict.fromkeys(path for path in paths if os.access(path, os.X_OK)))


def probe(python: str) -> tuple[tuple[int, ...], str | None] | None:
    """Version of an interpreter and what it lacks; None if it does not run."""
    try:
        out = subprocess.run(
            [python, "-c", PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=True,
        ).stdout
        told = json.loads(out)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return tuple(told["version"]), told["lacks"]


def dotted(version: tuple[int, ...]) -> str:
    """The version as it is written: 3.11.7."""
    return ".".join(map(str, version))


def require_compiler() -> None:
    """Finds a C++ compiler that runs.

    Raises:
        SetupError: If there is none.
    """
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["c++", "g++", "clang++"]:
        words = name.split()
        if words and shutil.which(words[0]):
            told = subprocess.run(
                [*words, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if told.returncode == 0:
                return
    what = f"CXX={chosen} does not run" if chosen else "found none"
    raise SetupError(
        f"needs a C++17 compiler; {what}; install one (Debian, Ubuntu: apt install g++) or set CXX"
    )


def call(command: list[str], failure: str) -> None:
    """Runs a command in the root, its output on stderr.

    Raises:
        SetupError: With this text if it fails.
    """
    environment = {**os.environ, "PYTHONNOUSERSITE": "1"}
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr, env=environment).returncode != 0:
        raise SetupError(failure)


def say(line: str) -> None:
    """Tells what goes on, on stderr."""
    print(f"setup: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
