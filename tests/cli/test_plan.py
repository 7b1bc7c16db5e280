"""`wscope plan`: table, verdict, budgets, exit codes."""

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines import CHECKPOINTS
from wscope_jax import cli, machine
from wscope_jax.cli import plan, start
from wscope_jax.sizes import amount

GIB = 1 << 30
QWEN = ["--model", "qwen3-30b-a3b", "--batch", "32", "--max-model-len", "32768"]
KEYS = [
    "bytes",
    "bytes_per_token",
    "layers",
    "fits",
    "short_by",
    "why",
    "largest_context",
    "largest_batch",
    "position_limit",
    "margin",
    "budgets",
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `wscope plan` in this process, on a machine with 64 GiB and no GPU."""
    memory = machine.Memory(64 * GIB, 48 * GIB, None, 48 * GIB)
    monkeypatch.setattr(start, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setenv("JAX_PLATFORMS", "")

    def in_process(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        return code, *capsys.readouterr()

    return in_process


def found(run: Run, *words: str) -> dict[str, Any]:
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    values = json.loads(out)
    assert isinstance(values, dict)
    return values


def test_json(run: Run) -> None:
    got = found(run, *QWEN, "--host-memory", "200GiB", "--gpu-memory", "80GiB")
    assert list(got) == KEYS
    assert list(got["bytes"]) == ["unpinned", "pinned", "window", "ping_pong", "spare", "weights"]
    assert got["bytes"]["weights"] == 61_064_245_248
    assert len(got["layers"]) == 48
    assert got["bytes_per_token"] == 98_304
    assert (got["fits"], got["short_by"], got["why"]) == (True, 0, None)
    assert got["position_limit"] == 40_960
    assert got["budgets"] == {"host": 200 * GIB, "gpu": 80 * GIB, "machine": None}


def test_what_does_not_fit_is_an_answer(run: Run) -> None:
    got = found(run, *QWEN, "--host-memory", "100GB", "--gpu-memory", "80GiB")
    assert not got["fits"]
    assert got["short_by"] == 103_079_215_104 + 2 * 32_768 * 2_048 - 100_000_000_000
    assert amount(got["short_by"]) in got["why"]
    for option, key in (("--max-model-len", "largest_context"), ("--batch", "largest_batch")):
        words = [*QWEN, "--host-memory", "100GB", "--gpu-memory", "80GiB", "--check"]
        assert run(*words, option, str(got[key]))[0] == 0
        code, out, err = run(*words, option, str(got[key] + 1))
        assert code == 3
        assert "DOES NOT FIT" in out
        assert err.startswith("wscope: error: host memory: ")
        assert "raise --host-memory or lower --max-model-len to " in err
        assert f"or lower --batch to {got['largest_batch']}" in err or option == "--batch"
        assert err.count("\n") == 1


def test_table(run: Run) -> None:
    how = ["--cpu-share", "0.601", "--host-memory", "200GiB", "--gpu-memory", "80GiB"]
    code, out, err = run(*QWEN, *how)
    assert (code, err) == (0, "")
    for text in ("61.96 GB", "41.12 GB", "805.3 MB", "67.11 MB", "61.06 GB", "0-47", "4 x 128+128"):
        assert text in out
    assert "\nfits\n" in out
    assert "largest context at batch 32: " in out
    assert "CPU share" not in out
    assert "CPU share: one half is taken here" in run(*QWEN)[1]


def test_layers_of_several_kinds(run: Run) -> None:
    words = ["--model", "deepseek-v4-flash", "--batch", "8", "--gpu-memory", "200GB"]
    out = run(*words, "--host-memory", "100GiB")[1]
    for text in ("sliding(128)", "1 x 512 per 4", "1 x 512 per 128", "resident", "cannot run it"):
        assert text in out


def test_spare_memory_moves_blocks_to_the_gpu(run: Run) -> None:
    words = [*QWEN, "--host-memory", "200GiB", "--gpu-memory", "100GiB"]
    usual, roomy = found(run, *words), found(run, *words, "--spare-memory", "20GB")
    placed = [sum(got["bytes"][name] for name in ("unpinned", "pinned")) for got in (usual, roomy)]
    blocks = placed[0] - placed[1]
    step = 32 * 256 * 98_304  # a block of each row, in all layers
    assert blocks == 20 * 10**9 // step * step
    assert roomy["bytes"]["window"] == usual["bytes"]["window"]
    assert roomy["bytes"]["spare"] - usual["bytes"]["spare"] == pytest.approx(blocks, rel=0.05)
    assert not found(run, *words, "--spare-memory", "60GB")["fits"]
    told = re.search(r"--spare-memory (\S+) would keep ([0-9,]+) tokens", run(*words)[1])
    assert told
    most = found(run, *words, "--spare-memory", told[1])
    assert most["fits"]
    left = sum(most["bytes"][name] for name in ("unpinned", "pinned"))
    assert placed[0] - left == int(told[2].replace(",", "")) * 32 * 98_304
    assert "would keep" not in run(*words, "--spare-memory", told[1])[1]
    out = run(*words, "--policy", "resident", "--spare-memory", "20GB")[1]
    assert "--spare-memory: of no use with policy resident" in out


def test_auto_is_resident_where_the_gpu_holds_all(run: Run) -> None:
    words = [*QWEN[:2], "--max-model-len", "32768", "--gpu-memory", "80GiB", "--host-memory", "1GB"]
    got = found(run, *words, "--check")
    assert got["fits"]
    assert got["bytes"]["unpinned"] == got["bytes"]["pinned"] == 0
    assert "the GPU holds the whole cache and keeps it there (resident)" in run(*words)[1]
    assert not found(run, *words, "--policy", "write_scope")["fits"]
    out = run(*words, "--policy", "write_scope")[1]
    told = re.search(r"--spare-memory (\S+) would keep .* then it fits", out)
    assert told
    assert found(run, *words, "--policy", "write_scope", "--spare-memory", told[1])["fits"]


def test_budgets_of_a_machine_without_a_gpu(run: Run) -> None:
    got = found(run, *QWEN)
    assert got["budgets"] == {"host": None, "gpu": None, "machine": 45 * GIB}
    assert "weights" in got["why"]  # they lie in the same memory
    out = run(*QWEN)[1]
    assert "GPU budget: none, there is no GPU here" in out
    assert "budget of everything, without a GPU: 48.32 GB, what this machine has left" in out
    assert "--gpu-memory to plan for another machine" in run(*QWEN, "--check")[2]


def test_a_host_budget_does_not_make_a_machine_without_a_gpu_larger(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*QWEN, "--host-memory", "100GiB"]
    got = found(run, *words)
    assert got["budgets"] == {"host": 100 * GIB, "gpu": None, "machine": 45 * GIB}
    assert not got["fits"]
    assert got["why"].startswith(
        "this machine's memory: the placed blocks, their buffers, weights,"
    )
    code, _, err = run(*words, "--check")
    assert code == 3
    assert "give --host-memory and --gpu-memory to plan for another machine" in err
    assert found(run, *words, "--gpu-memory", "80GiB")["fits"]
    for left, fits in ((80, False), (200, True)):  # 107 GB of blocks, 62 of weights and windows
        memory = machine.Memory(256 * GIB, left * GIB, None, left * GIB)
        monkeypatch.setattr(machine, "memory", lambda memory=memory: memory)
        assert found(run, *words)["fits"] == fits


def test_budgets_of_a_machine_with_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [machine.Gpu("H", 140 * GIB, 130 * GIB)]
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    got = found(run, *QWEN)
    assert got["budgets"] == {"host": 45 * GIB, "gpu": 130 * GIB, "machine": None}
    assert got["margin"] == 130 * GIB // 16
    assert "weights" not in got["why"]
    assert "what is free on the H" in run(*QWEN)[1]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert found(run, *QWEN)["budgets"]["gpu"] is None


def test_cgroup_limit_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = machine.Memory(64 * GIB, 48 * GIB, 16 * GIB, 10 * GIB)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    assert found(run, *QWEN)["budgets"]["machine"] == memory.budget < 10 * GIB
    assert "its cgroup's limit is 17.18 GB" in run(*QWEN)[1]


def test_checkpoint_directory(run: Run) -> None:
    got = found(run, "--model", str(CHECKPOINTS["qwen3_moe"]), "--window", "32")
    assert got["fits"]
    assert got["bytes"]["unpinned"] == got["bytes"]["pinned"] == 64 * 32 * got["bytes_per_token"]
    double = found(run, "--model", str(CHECKPOINTS["qwen3_moe"]), "--dtype", "float32")
    assert double["bytes_per_token"] == 2 * got["bytes_per_token"]
    assert double["bytes"]["weights"] == 2 * got["bytes"]["weights"]


@pytest.mark.parametrize(
    ("policy", "empty"),
    [("gpu_only", ["unpinned"]), ("cpu_only", ["pinned", "ping_pong"])],
)
def test_policies(run: Run, policy: str, empty: list[str]) -> None:
    sizes = found(run, *QWEN, "--policy", policy)["bytes"]
    assert [name for name, size in sizes.items() if size == 0] == empty
    sizes = found(run, *QWEN, "--policy", "resident")["bytes"]
    assert sizes["window"] + sizes["spare"] == 32 * 32_768 * 98_304


def test_beyond_the_positions_is_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        code, _, _ = run("--model", "mixtral-8x7b", "--max-model-len", "32769", "--json")
    assert code == 0
    assert "32769 tokens exceed the 32768 positions" in caplog.text


@pytest.mark.parametrize(
    ("words", "code", "about"),
    [
        (["--model", "gpt-2"], 4, "qwen3-30b-a3b"),
        (["--model", "qwen3-30b-a3b", "--max-model-len", "9999999999"], 2, "2147483647"),
        (["--model", "qwen3-30b-a3b", "--policy", "gpu_only", "--cpu-share", "1"], 2, "gpu_only"),
    ],
)
def test_errors(run: Run, words: list[str], code: int, about: str) -> None:
    got, out, err = run(*words)
    assert (got, out) == (code, "")
    assert err.startswith("wscope: error: ")
    assert err.count("\n") == 1
    assert about in err


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "3"),
        ([0, 1], "0, 1"),
        (range(48), "0-47"),
        (range(2, 43, 2), "2, 4 .. 42"),
        ([0, 1, 5, 6, 9], "0, 1, 5, 6 .. 9"),
    ],
)
def test_spans(indices: Any, text: str) -> None:
    assert plan.spans(list(indices)) == text
