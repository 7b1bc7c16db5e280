"""Compiled programs that are kept from one run to the next."""

import logging
import os
import zlib
from pathlib import Path
from typing import Any

from wscope_jax.errors import is_out_of_memory

log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where compiled programs persist between runs: one folder per kind of processor.

    A program compiled for one processor may use instructions that another lacks, and a home directory may be shared.
    None for a user who has no home directory, as in a container under a foreign user id.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return Path(home) / "wscope_jax" / f"xla-{zlib.crc32(features.encode()):08x}"


def warn() -> None:
    """Says that every run will compile anew where compiled programs cannot be kept."""
    if (why := refusal()) is not None:
        log.warning("compiled programs are not kept, so that every run compiles them anew: %s", why)


def refusal() -> str | None:
    """Why compiled programs cannot be kept between runs, and what to do; None if they can."""
    asked = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if asked is not None and (not asked or "://" in asked):  # not wanted, or on a remote store
        return None
    kept_in = folder() if asked is None else Path(asked)
    remedy = "set JAX_COMPILATION_CACHE_DIR to a folder that you may write to"
    if kept_in is None:
        return f"there is no home directory; {remedy}"
    try:
        kept_in.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{kept_in}: {error.strerror or error}; {remedy}"
    return None if os.access(kept_in, os.W_OK | os.X_OK) else f"{kept_in}: not writable; {remedy}"


def replace_broken() -> None:
    """Lets jax compile and keep anew a kept program that it cannot read.

    jax writes programs in place and never overwrites one: what a process that was killed has written half would be
    compiled in every run from then on. What another process is still writing does no harm either.
    """
    import jax

    try:  # not public; elsewhere jax does not say which file it cannot read
        from jax._src import compilation_cache

        read = compilation_cache.get_executable_and_time
    except (ImportError, AttributeError):  # a jax to come; tests/cli/test_start.py fails then
        return
    if read.__name__ == "read_or_discard":
        return

    def read_or_discard(cache_key: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(cache_key, *args, **kwargs)
        except (OSError, MemoryError):  # no fault of the program's: a lock, a disk, a limit
            raise
        except Exception as error:
            kept_in = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
            if not kept_in or "://" in kept_in or is_out_of_memory(error):
                raise
            try:
                Path(kept_in, f"{cache_key}-cache").unlink()
            except OSError:
                raise error from None  # jax warns of it
            log.info("%s could not be read and is compiled anew: %s", cache_key, error)
            return None, None  # there is none

    compilation_cache.get_executable_and_time = read_or_discard
