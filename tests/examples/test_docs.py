"""The programs in the documents run as they stand there."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from wscope_jax.layout import Region
from wscope_jax.ops.reference import attend_reference

ROOT = Path(__file__).parents[2]


def run_first_program(document: str) -> dict[str, Any]:
    """Runs the first block of Python of a document; its names."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    assert found is not None
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(found[1], document, "exec"), names)
    return names


def test_the_cache_in_an_attention_of_your_own() -> None:
    names = run_first_program("docs/embedding.md")
    q, k, v, scale = names["q"], names["k"], names["v"], names["K"] ** -0.5
    everything = k[None], v[None], jnp.array([len(q)], jnp.int32)
    dense = attend_reference(q[-1:], *everything, scale=scale)
    assert float(jnp.abs(names["o"] - dense.o).max()) < 1e-5


def test_the_cache_of_that_program_uses_all_regions(capsys: pytest.CaptureFixture[str]) -> None:
    run_first_program("docs/embedding.md")
    said = capsys.readouterr().out
    for region in (Region.UNPINNED, Region.PINNED, Region.WINDOW):
        assert re.search(rf"{region.value}[^0-9]*[1-9]", said), said


def test_text_from_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run_first_program("README.md")
    assert len(capsys.readouterr().out) > 100
