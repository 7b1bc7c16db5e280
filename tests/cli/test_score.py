"""The log-likelihood that `score` prints."""

import numpy as np
import pytest

from wscope_jax.cli import score


@pytest.mark.parametrize("num_targets", [1, 5, score._CHUNK, score._CHUNK + 3])
@pytest.mark.parametrize("rows", [(), (2,)])
def test_mean_nll(num_targets: int, rows: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*rows, num_targets + 1, 11)).astype(np.float32) * 30
    targets = rng.integers(0, 11, (*rows, num_targets))
    exact = logits[..., :-1, :].astype(np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], -1).mean()
    assert score.mean_nll(logits, targets) == pytest.approx(expected, rel=1e-12)


def test_no_targets() -> None:
    assert score.mean_nll(np.zeros((1, 3), np.float32), np.zeros((0,), np.int64)) is None


def test_extreme_logits() -> None:
    logits = np.array([[1e30, -1e30], [0, 0]], np.float32)
    assert score.mean_nll(logits, np.array([0])) == 0.0
