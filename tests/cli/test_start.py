"""What stands in the environment before jax starts, and what the engine is asked for."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.engines import CHECKPOINTS
from wscope_jax import cores, devices, machine, policies
from wscope_jax.cli import kept_programs, options, start
from wscope_jax.engine import Engine
from wscope_jax.errors import CapacityError, MachineError, UsageError
from wscope_jax.progress import SILENT
from wscope_jax.sampling import Sampling


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four cores, and nothing that a test sets outlives it."""
    for name in ("NPROC", "TF_CPP_MIN_LOG_LEVEL", "WSCOPE_DEBUG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(cores, "available", lambda: 4)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    with warnings.catch_warnings():
        yield


@pytest.mark.parametrize(("threads", "nproc"), [(None, "2"), (1, "3"), (9, "1")])
def test_xla_keeps_to_its_cores(threads: int | None, nproc: str) -> None:
    start.prepare(threads)
    assert os.environ["NPROC"] == nproc
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "7")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    start.prepare()
    assert (os.environ["NPROC"], os.environ["TF_CPP_MIN_LOG_LEVEL"]) == ("7", "0")


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H", 1, 1)])
    start.prepare()
    assert "NPROC" not in os.environ


def test_debug_leaves_the_libraries_talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSCOPE_DEBUG", "1")
    start.prepare()
    assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ


def test_weights_are_checked_before_jax_is_there() -> None:
    """What `prepare` sets, jax reads when it is imported: the folder of compiled programs, for one."""
    code = (
        "import argparse, pathlib, sys; from wscope_jax.cli import weights\n"
        "for config in (None, 'qwen3-30b-a3b'):\n"
        "    weights.of(argparse.Namespace(model=pathlib.Path('x'), random_weights=config,\n"
        "                                  check_tensors=False, dtype=None, seed=3))\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_log_lines() -> None:
    record = logging.LogRecord("wscope_jax.x", logging.WARNING, "", 0, "%d tokens", (3,), None)
    assert start._OneLine().format(record) == "wscope: warning: 3 tokens"


@pytest.mark.parametrize(
    ("words", "limit", "expected"),
    [
        (["--host-memory", "64GB"], None, []),
        (["--host-memory", "65GB"], None, ["--host-memory 65.00 GB: this machine has only 64.00"]),
        (["--host-memory", "9GB"], 8 * 10**9, ["9.000 GB: this process may use only 8.000 GB"]),
        (["--gpu-memory", "80GB"], None, ["--gpu-memory 80.00 GB: the H has only 40.00 GB"]),
        (["--gpu-memory", "40GB"], None, []),
        ([], 1, []),
    ],
)
def test_budgets_beyond_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    words: list[str],
    limit: int | None,
    expected: list[str],
) -> None:
    memory = machine.Memory(64 * 10**9, 10**9, limit, 10**9)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H", 40 * 10**9, 10**9)])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    start._warn_of_budgets(options.build_parser().parse_args(["generate", "--model", "m", *words]))
    assert len(caplog.messages) == len(expected)
    assert all(about in text for about, text in zip(expected, caplog.messages, strict=True))


def test_a_gpu_without_room_is_told_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "memory_left", lambda: 1 << 20)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H", 1 << 37, 1 << 20, (4711, 4712))])
    words = ["generate", "--model", str(CHECKPOINTS["qwen3_moe"]), "--prompt", "x"]
    parser = options.build_parser()
    with pytest.raises(CapacityError, match="GPU memory") as caught:
        start.require_fit(parser.parse_args(words), 1, 200, shorter="lower it to {}")
    assert "process 4711, 4712 holds some" in str(caught.value)
    arguments = parser.parse_args([*words, "--gpu-memory", "1KiB"])
    with pytest.raises(CapacityError, match="raise --gpu-memory"):
        start.require_fit(arguments, 1, 200, shorter="lower it to {}")


def opened(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """What the engine is asked for by these options."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        Engine, "from_pretrained", lambda directory, **rest: asked.update(rest, directory=directory)
    )
    start.open_engine(options.build_parser().parse_args(["generate", "--model", "m", *words]))
    return asked


def test_open_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--policy",
        "gpu_only",
        "--window",
        "64",
        "--dtype",
        "float32",
        "--gpu-memory",
        "1GiB",
        "--threads",
        "2",
    ]
    assert opened(monkeypatch, *words) == {
        "directory": Path("m"),
        "policy": policies.GpuOnly(),
        "window": 64,
        "dtype": "float32",
        "gpu_memory": 1 << 30,
        "host_memory": None,
        "spare_memory": 0,
        "threads": 2,
        "progress": SILENT,
        "check_tensors": False,
    }


def test_share_makes_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in ("auto", "write_scope"):
        asked = opened(monkeypatch, "--policy", policy, "--cpu-share", "0.3")
        assert asked["policy"] == policies.WriteScope(share=0.3)


def test_share_of_a_fixed_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="share"):
        opened(monkeypatch, "--policy", "cpu_only", "--cpu-share", "0.3")


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no backend 'cuda'")])
def test_no_device(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(
        MachineError, match=r"JAX_PLATFORMS=cpu: no .*('cuda|plugin).*set it to cpu"
    ):
        start.require_device()


def sampling(*words: str) -> Any:
    parsed = options.build_parser().parse_args(["generate", "--model", "m", *words])
    return start.make_sampling(parsed)


def test_sampling_defaults_are_the_librarys() -> None:
    assert sampling() == Sampling()
    assert Sampling().max_new_tokens == 128  # as --help says


def test_sampling() -> None:
    got = sampling("--temperature", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b")
    assert (got.temperature, got.top_k, got.stop) == (0.5, 3, ("a", "b"))
    assert (got.top_p, got.min_p, got.seed, got.ignore_eos) == (1.0, 0.0, 0, False)


@pytest.mark.parametrize(
    "words",
    ["--temperature -1", "--temperature nan", "--top-p 0", "--top-k -1", "--min-p 2", "--seed -1"],
)
def test_sampling_out_of_range(words: str) -> None:
    with pytest.raises(UsageError):
        sampling(*words.split())


def test_programs_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said once, with what to do; not where the user wants none, or has them elsewhere."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    for asked, told in (("", None), ("gs://x/y", None), (str(tmp_path), None)):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", asked)
        assert kept_programs.refusal() is told
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    refusal = kept_programs.refusal()
    assert refusal is not None
    assert refusal.startswith(f"{tmp_path / 'file'}/.cache/wscope_jax/")
    assert "Not a directory; set JAX_COMPILATION_CACHE_DIR" in refusal


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A folder of its own for compiled programs, of those too that take no time."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_program_that_was_written_half_is_written_anew(kept: Path, part: float) -> None:
    """By a process that was killed, say; jax's own warning of such a program would be an error here."""
    x = np.arange(8, dtype=np.float32)

    def compile_anew() -> float:
        return float(jax.jit(lambda x: jnp.sin(x) @ x)(x))

    start.require_device()
    expected = compile_anew()
    (file,) = kept.glob("*-cache")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * part)])
    os.utime(file, (0, 0))
    assert compile_anew() == expected
    written = file.stat().st_mtime
    assert written > 0
    assert compile_anew() == expected
    assert file.stat().st_mtime == written  # it could be read, or else it were a new one


@pytest.mark.parametrize("error", [OSError("no disk"), MemoryError(), TimeoutError("a lock")])
def test_a_program_that_is_no_worse_than_the_machine_stays(
    kept: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.require_device()
    x = np.arange(8, dtype=np.float32)
    jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) @ x)(x))
    (file,) = kept.glob("*-cache")

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("jax._src.compilation_cache.decompress_executable", fails)
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) @ x)(x))
    assert file.exists()
