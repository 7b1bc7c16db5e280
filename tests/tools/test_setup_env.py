"""The choice of an interpreter and the stamp; nothing is installed."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "setup_env.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, at home in an empty directory, with nothing on PATH but its `bin`."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, path in (("ROOT", "."), ("VENV", ".venv"), ("STAMP", ".venv/stamp.json")):
        monkeypatch.setattr(module, name, tmp_path / path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "ffi").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "pyproject.toml"))
    return module


def put(module: ModuleType, name: str, script: str) -> str:
    """Makes an executable on PATH."""
    file: Path = module.ROOT / "bin" / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def told(version: tuple[int, ...], lacks: str | None = None) -> str:
    return f"echo '{json.dumps({'version': version, 'lacks': lacks})}'"


def test_probe_of_this_one(setup: ModuleType) -> None:
    assert setup.probe(sys.executable)[0] == sys.version_info[:3]


def test_shims_that_stand_for_nothing_are_skipped(setup: ModuleType) -> None:
    put(setup, "python3", "exit 127")
    put(setup, "python3.13", "echo nonsense")
    chosen = put(setup, "python3.12", told((3, 12, 1)))
    assert setup.find_python() == (chosen, (3, 12, 1))


def test_python3_goes_first(setup: ModuleType) -> None:
    chosen = put(setup, "python3", told((3, 11, 2)))
    put(setup, "python3.13", told((3, 13, 0)))
    assert setup.find_python() == (chosen, (3, 11, 2))


def test_unsuitable_ones_are_named(setup: ModuleType) -> None:
    put(setup, "python3", told((3, 10, 13)))
    put(setup, "python3.12", told((3, 12, 1), "the venv module"))
    put(setup, "python3.14", told((3, 15, 0)))
    with pytest.raises(setup.SetupError) as error:
        setup.find_python()
    for part in ("3.11 to 3.14", "3.10.13", "3.12.1", "without the venv module", "3.15.0"):
        assert part in str(error.value)


def test_none_at_all(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match="found none"):
        setup.find_python()


def test_the_chosen_one_is_taken_or_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(setup, "python3", told((3, 11, 2)))
    chosen = put(setup, "mine", told((3, 13, 0)))
    monkeypatch.setenv("PYTHON", chosen)
    assert setup.find_python() == (chosen, (3, 13, 0))
    put(setup, "mine", told((3, 9, 0)))
    with pytest.raises(setup.SetupError, match=r"PYTHON=.*mine is Python 3\.9\.0"):
        setup.find_python()
    monkeypatch.setenv("PYTHON", "/no/such")
    with pytest.raises(setup.SetupError, match="does not run"):
        setup.find_python()


def test_the_environment_itself_is_no_choice(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", str(setup.VENV / "bin" / "python"))
    assert setup.asked_python() == ""
    inside = setup.VENV / "bin"
    inside.mkdir(parents=True)
    (inside / "python3").write_text("#!/bin/sh\n")
    (inside / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{inside}{os.pathsep}{os.environ['PATH']}")
    assert setup.candidates() == []


def test_no_compiler(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(setup.SetupError, match=r"C\+\+17 compiler"):
        setup.require_compiler()
    put(setup, "g++", "exit 0")
    setup.require_compiler()
    monkeypatch.setenv("CXX", "none-such -O2")
    with pytest.raises(setup.SetupError, match="CXX=none-such"):
        setup.require_compiler()


def test_stamp(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup.read_stamp() is None
    (setup.VENV / "bin").mkdir(parents=True)
    stamp = {"fingerprint": setup.fingerprint(), "extras": ["test"], "python": ""}
    setup.STAMP.write_text(json.dumps(stamp))
    assert setup.read_stamp() is None  # no interpreter, no command
    for name in ("python", "wscope"):
        (setup.VENV / "bin" / name).touch()
    assert setup.read_stamp() == stamp
    monkeypatch.setenv("PYTHON", "/another/python3")
    assert setup.read_stamp() is None
    setup.STAMP.write_text("{")
    assert setup.read_stamp() is None


def test_fingerprint_sees_every_source(setup: ModuleType) -> None:
    seen = {setup.fingerprint()}
    (setup.ROOT / "ffi" / "a.cc").write_text("int a;")
    seen.add(setup.fingerprint())
    (setup.ROOT / "ffi" / "a.cc").write_text("int b;")
    seen.add(setup.fingerprint())
    (setup.ROOT / "pyproject.toml").write_text("[build-system]")
    seen.add(setup.fingerprint())
    assert len(seen) == 4
