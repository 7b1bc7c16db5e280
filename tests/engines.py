"""Engines over the golden checkpoints, made once: compiled programs are what tests wait for."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wscope_jax import Engine, policies

ROOT = Path(__file__).parent
CHECKPOINTS = {
    "qwen3_moe": ROOT.parent / "wscope_jax" / "assets" / "tiny_qwen3_moe",
    "mixtral": ROOT / "golden" / "mixtral",
    "deepseek_v2": ROOT / "golden" / "deepseek_v2",
}
FAMILIES = tuple(CHECKPOINTS)

ALL_POLICIES: dict[str, policies.Policy] = {
    **{f"share_{share}": policies.choose("write_scope", share) for share in (0.0, 0.3, 0.5, 1.0)},
    "gpu_only": policies.GpuOnly(),
    "cpu_only": policies.CpuOnly(),
    "resident": policies.Resident(),
}


class Golden(NamedTuple):
    """What transformers computed, in float32: see tests/golden/README.md."""

    ids: Any  # int32 [2, 37]
    seq: Any  # int32 [2, 53]
    logits: Any  # [2, 37, V]
    step_logits: Any  # [2, 16, V]
    long_ids: Any  # int32 [1100]
    long_first: int
    long_logits: Any  # [401, V], of positions long_first - 1 to 1099


@functools.cache
def golden(family: str) -> Golden:
    with np.load(ROOT / "golden" / family / "golden.npz") as data:
        return Golden(
            *(data[name] for name in ("ids", "seq", "logits", "step_logits")),
            long_ids=data["long_ids"][0],
            long_first=int(data["long_first"]),
            long_logits=data["long_logits"],
        )


# Few: each holds thousands of memory maps of compiled programs, of which a process may have 65,530.
@functools.lru_cache(maxsize=3)
def engine(family: str = "qwen3_moe", window: int = 32) -> Engine:
    """A float32 engine with policy "auto"; set `.policy` before each use."""
    return Engine.from_pretrained(CHECKPOINTS[family], dtype="float32", window=window, threads=2)


@functools.cache
def auto_policy(family: str, window: int) -> policies.Policy:
    return engine(family, window).policy
