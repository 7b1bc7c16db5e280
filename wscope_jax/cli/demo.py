"""`wscope demo`: a bundled tiny model through all four regions, checked against a dense cache."""

import argparse
import importlib.resources
import sys
from typing import Any, Final

import numpy as np

from wscope_jax.cli import answer, report, start

_PROMPT_TOKENS: Final = 4000  # 15 blocks of 256 and a rest of 160
_NEW_TOKENS: Final = 400  # evictions at 4,096 and at 4,352 tokens fall into decode
_WINDOW: Final = 256
_SEED: Final = 0
_TOLERANCE: Final = 1e-4  # of logits, float32


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns 0 if the four regions give the logits of a dense cache, else 1.

    Raises:
        WscopeError: What was wrong, with its exit code.
    """
    start.prepare()
    start.require_device()
    values, difference = _measure()
    if arguments.json:
        answer.print_json(values)
    else:
        report.print_regions(values["regions"], sys.stdout)
        print(report.summary(values))
        verdict = "match" if values["matches_dense"] else "DIFFER FROM"
        print(
            f"forced logits of {_NEW_TOKENS} decode steps {verdict} those of a dense cache: "
            f"largest difference {difference:.1e}, allowed {_TOLERANCE:.0e}"
        )
    return 0 if values["matches_dense"] else 1


def _measure() -> tuple[dict[str, Any], float]:
    """A generation's result with `matches_dense`, and the largest difference of a logit."""
    from wscope_jax.engine import Engine
    from wscope_jax.sampling import Sampling

    with importlib.resources.as_file(_checkpoint()) as directory:
        _say(f"loading {directory.name}, float32")
        engine = Engine.from_pretrained(
            directory, policy="write_scope", window=_WINDOW, dtype="float32"
        )
    with engine:
        prompt = np.random.default_rng(_SEED).integers(0, engine.model.vocab_size, _PROMPT_TOKENS)
        _say(f"prefilling {_PROMPT_TOKENS:,} tokens, then {_NEW_TOKENS} steps of decode")
        sampling = Sampling(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
        values = engine.generate([prompt.tolist()], sampling).as_dict()
        ids = np.concatenate([prompt, np.asarray(values["tokens"][0], prompt.dtype)])
        _say("forcing the same tokens through the four regions, and once without a cache")
        forced = engine.score(ids, _PROMPT_TOKENS)
        dense = engine.logits(ids[None])[0, _PROMPT_TOKENS - 1 :]
    difference = float(np.abs(forced - dense).max())
    return {**values, "matches_dense": difference < _TOLERANCE}, difference


def _checkpoint() -> Any:
    return importlib.resources.files("wscope_jax") / "assets" / "tiny_qwen3_moe"


def _say(line: str) -> None:
    print(f"wscope: {line}", file=sys.stderr, flush=True)
