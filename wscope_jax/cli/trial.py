"""Starts jax as `generate` would, in a process of its own: on a GPU a backend keeps memory until its process ends."""

import os
import subprocess
import sys
from typing import Final

from wscope_jax.errors import MachineError

DEADLINE_S: Final = 120.0  # on a busy machine with many GPUs
PROGRAM: Final = "import sys; from wscope_jax.cli import trial; sys.exit(trial.main())"


def start_jax() -> tuple[int, str]:
    """The exit code, and the kind of device that jax chose or why it does not start."""
    quiet = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, **quiet},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"jax has not started within {DEADLINE_S:.0f} s"
    said = " ".join(done.stdout.split())
    return done.returncode, said or f"jax does not start (exit code {done.returncode})"


def main() -> int:
    """What the process does."""
    from wscope_jax.cli import start

    try:
        start.require_device()
    except MachineError as error:
        print(error)
        return MachineError.exit_code
    import jax

    print(jax.devices()[0].device_kind)
    return 0
