"""Strict settings for every test: silent promotion of dtypes or ranks is a failure, shapes are checked."""

import gc
import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wscope_jax import Engine

# `-m gpu` chooses the tests that compare a GPU with the CPU.
os.environ.setdefault(
    "JAX_PLATFORMS", "cuda,cpu" if ("-m", "gpu") in itertools.pairwise(sys.argv) else "cpu"
)
# Most of the suite's time is XLA's; what it compiled once is taken from there, by child processes too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# A shell tells what it starts in the background to ignore Ctrl-C, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    # Pytrees (views) hold tracers, shapes or nothing at all while JAX maps over them: not checked.
    install_import_hook(
        [
            f"wscope_jax.{name}"
            for name in ("ops", "partial", "sampling", "experts", "attention", "models")
        ],
        "beartype.beartype",
    )


@pytest.fixture
def eng() -> "Engine":
    """The tiny engine, its placed blocks halved between CPU and link."""
    from tests.engines import ALL_POLICIES, engine

    made = engine()
    made.policy = ALL_POLICIES["share_0.5"]
    return made


def pytest_configure() -> None:
    """Some tests kill processes, and others run beside this one: both leave programs half written."""
    from wscope_jax.cli import kept_programs

    kept_programs.replace_broken()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One process has the GPU, where each would take most of its memory: jax's default."""
    takes_most = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true") != "false"
    on_gpu = os.environ["JAX_PLATFORMS"].startswith("cuda")
    if on_gpu and takes_most and hasattr(config.option, "numprocesses"):
        config.option.numprocesses = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ["JAX_PLATFORMS"].startswith("cuda"):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and `-m gpu`"))


def pytest_collection_finish() -> None:
    """What is there now stays: collections, of which there is one after each module, leave it out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _drop_compiled_programs() -> Iterator[None]:
    """A module leaves no engine behind: XLA aborts where the system grants no further memory map."""
    yield
    if "tests.engines" in sys.modules:
        sys.modules["tests.engines"].engine.cache_clear()
        gc.collect()
