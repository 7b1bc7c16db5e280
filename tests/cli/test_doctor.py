"""`wscope doctor`: on this machine, and on machines that lack something."""

import importlib
import importlib.metadata
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wscope_jax
from tests import processes
from wscope_jax import cli, cores, machine
from wscope_jax.cli import doctor, probes

GIB = 1 << 30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in probes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probes, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "KERNEL_BLOCKS", 8)
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(probes.trial, "start_jax", lambda: (0, "cpu"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, dict[str, Any], str]]:
    def in_process() -> tuple[int, dict[str, Any], str]:
        code = cli.main(["doctor", "--json"])
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        values = json.loads(out)
        findings = {finding.pop("name"): finding for finding in values["findings"]}
        assert values["works"] is (code == 0)
        return code, findings, err

    return in_process


Run = Callable[[], tuple[int, dict[str, Any], str]]


def test_this_machine(run: Run) -> None:
    code, found, err = run()
    assert (code, err) == (0, "")
    for name in (
        *("wscope_jax", "Python", "jax", "jaxlib", "flax", "extension", "CPU", "CPU features"),
        *("attention kernels", "cores", "memory", "memory limit", "huge pages", "memlock", "NUMA"),
        *("GPU", "read bandwidth", "attention reads"),
    ):
        assert found[name]["value"]
    assert all(entry["remedy"] for entry in found.values() if entry["status"] == "warning")
    workers = cores.split(cores.available()).workers
    for name, about in (
        ("read bandwidth", f"on {workers} thread"),
        ("attention reads", f"on {workers} worker"),
    ):
        rate, _, what = found[name]["value"].partition(": ")
        assert re.fullmatch(r"[0-9]+\.[0-9] GB/s", rate)
        assert about in what  # both by as many threads, so that one can be held against the other


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "read bandwidth" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(("refusal", "status"), [("", "ok"), ("seccomp", "note")])
def test_kernels(run: Run, monkeypatch: pytest.MonkeyPatch, refusal: str, status: str) -> None:
    module = importlib.import_module("wscope_jax._ffi")
    monkeypatch.setattr(module, "isas", lambda: ["portable", "avx2"], raising=False)
    monkeypatch.setattr(module, "amx_refusal", lambda: refusal, raising=False)
    monkeypatch.setattr(module, "isa_of", lambda *_: "avx2", raising=False)
    found = run()[1]
    assert found["attention kernels"]["status"] == status
    assert found["attention kernels"]["value"].startswith("portable, avx2")
    assert "avx2, bfloat16" in found["attention reads"]["value"]


def refused(run: Run, about: str) -> dict[str, Any]:
    code, found, err = run()
    assert code == 5
    assert err.startswith("wscope: error: ")
    assert err.count("\n") == 1
    assert about in err
    return found


def test_no_extension(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wscope_jax._ffi", None)
    found = refused(run, "make install")
    assert found["extension"]["status"] == "fault"
    assert "attention reads" not in found


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 15, 0)])
def test_python_that_is_not_supported(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert refused(run, "use Python 3.11 to 3.14")["Python"]["status"] == "fault"


@pytest.mark.parametrize(
    ("installed", "status"),
    [("0.10.2", "ok"), ("0.12.9.1", "ok"), ("0.10.1", "warning"), ("0.13.0.dev3", "warning")],
)
def test_versions_of_jax(
    run: Run, monkeypatch: pytest.MonkeyPatch, installed: str, status: str
) -> None:
    whole = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: installed if name == "jax" else whole(name)
    )
    code, found, _ = run()
    assert (code, found["jax"]["status"]) == (0, status)


def test_a_package_that_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert refused(run, "make install")["flax"]["status"] == "fault"


def test_a_lean_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available", lambda *_: 1)
    monkeypatch.setattr(cores, "quota_cores", lambda *_: 1.5)
    memory = machine.Memory(64 * GIB, 40 * GIB, 8 * GIB, 7 * GIB)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.setattr(machine, "huge_pages", lambda: "never")
    monkeypatch.setattr(machine, "memlock", lambda: 8 << 20)
    monkeypatch.setattr(machine, "numa_nodes", lambda: {0: "0-7", 1: "8-15"})
    code, found, _ = run()
    assert code == 0
    assert "quota 1.5" in found["cores"]["value"]
    assert found["cores"]["status"] == found["huge pages"]["status"] == "warning"
    assert "8.590 GB by cgroup" in found["memory limit"]["value"]
    assert "ulimit -l" in found["memlock"]["remedy"]
    assert "numactl" in found["NUMA"]["remedy"]


def test_a_gpu_that_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [machine.Gpu("H", 140 * GIB, 20 * GIB, (4711,))]
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(machine, "gpu_driver", lambda: "550.1")
    monkeypatch.setattr(machine, "memlock", lambda: 8 << 20)
    _, found, _ = run()
    assert "nvidia-smi" in found["GPU"]["remedy"]
    assert "process 4711 holds" in found["GPU"]["remedy"]
    assert found["GPU driver"]["value"] == "550.1"
    assert found["memlock"]["status"] == "warning"
    if not probes._version("jax-cuda12-plugin") and not probes._version("jax-cuda13-plugin"):
        assert "wscope-jax[cuda12]" in found["jax's CUDA plugin"]["remedy"]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("JAX_ENABLE_X64", "1", "warning"),
        ("JAX_ENABLE_X64", "False", "ok"),
        ("JAX_PLATFORMS", "cpu", "ok"),
        ("JAX_PLATFORMS", "tpu", "warning"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "warning"),
        ("XLA_FLAGS", "--xla_dump_to=x", "ok"),
    ],
)
def test_variables(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, status: str
) -> None:
    monkeypatch.setenv(name, value)
    code, found, _ = run()
    assert code == 0
    assert found[name] == {**found[name], "value": value, "status": status}


def test_a_gpu_that_is_asked_for_and_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    refused(run, "there is none")


def test_a_probe_that_fails_is_a_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(machine, "memory", fail)
    monkeypatch.setattr(os, "cpu_count", fail)
    code, found, _ = run()
    assert code == 0
    assert "no /proc here" in found["memory"]["value"]
    assert found["cores"]["status"] == "warning"


@pytest.mark.parametrize(
    "setting", ["JAX_PLATFORMS=nonsense", "JAX_DISABLE_JIT=1", "WSCOPE_ISA=nonsense"]
)
def test_what_generate_refuses_is_a_fault(setting: str) -> None:
    """The same exit code and the same reason, from both."""
    name, _, value = setting.partition("=")
    environment = processes.environment(**{name: value})
    model = Path(wscope_jax.__file__).parent / "assets" / "demo_model"
    for words in (["doctor", "--json"], ["generate", "--model", model, "--prompt", "x"]):
        with processes.start(environment, *words) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 5, err
        assert name in err.decode().splitlines()[-1]
        assert words[0] == "generate" or json.loads(out)["works"] is False


def test_a_path_is_one_word_in_a_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, value = io.StringIO(), "/a" * 200
    monkeypatch.setattr(sys, "stdout", out)
    doctor._print([probes.Finding("extension", value)])
    assert value in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_no_place_for_compiled_programs(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "below"))
    _, found, _ = run()
    assert found["compiled programs"]["status"] == "warning"
    assert "Not a directory" in found["compiled programs"]["remedy"]
