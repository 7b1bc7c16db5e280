"""`wscope` in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

COMMAND = (sys.executable, "-m", "wscope_jax")


def environment(compiled: Path | None = None, **changes: str) -> dict[str, str]:
    """This process's environment for children that run on the CPU.

    Args:
        compiled: folder of compiled programs, also of those that take no time; None = the test run's.
        changes: variables that differ.
    """
    found = {**os.environ, "JAX_PLATFORMS": "cpu", **changes}
    if compiled is not None:
        found["JAX_COMPILATION_CACHE_DIR"] = str(compiled)
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return found


def start(environment: Mapping[str, str], *words: object) -> "subprocess.Popen[bytes]":
    """Starts `wscope` with unbuffered pipes for its output, and nothing on stdin."""
    return python(environment, *COMMAND[1:], *words)


def python(environment: Mapping[str, str], *words: object) -> "subprocess.Popen[bytes]":
    """Starts this interpreter in the same way."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
    )


def shell(environment: Mapping[str, str], script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a shell script to its end, in which `wscope` is the command."""
    words = " ".join(f"'{word}'" for word in COMMAND)
    return subprocess.run(
        ["/bin/sh", "-c", f'wscope() {{ {words} "$@"; }}\n{script}'],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
