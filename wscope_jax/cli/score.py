"""`wscope score`: the log-likelihood of given tokens, forced one by one through decode."""

import argparse
import math
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from wscope_jax.cli import answer, progress, start, weights
from wscope_jax.cli.prompts import Ids, read_tokens
from wscope_jax.errors import UsageError, WscopeError
from wscope_jax.sizes import counted

_CHUNK: Final = 256  # positions turned to float64 at a time; a vocabulary may have 150,000 entries


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code.

    Raises:
        WscopeError: What was wrong, with its exit code.
    """
    weights.of(arguments)  # refuses options that do not go together
    ids = read_tokens(arguments.tokens)
    prefill, length = arguments.prefill, ids.shape[-1]
    if prefill > length:
        raise UsageError(
            f"--prefill {prefill}: beyond the {counted(length, 'token')}; give 1 to {length}"
        )
    if arguments.max_model_len is not None and arguments.max_model_len < length:
        raise UsageError(
            f"--max-model-len {arguments.max_model_len}: less than the {counted(length, 'token')}; raise it, or "
            "leave it out"
        )
    if arguments.logits_out is not None:
        answer.require_writable(arguments.logits_out, "--logits-out")
        answer.require_not_read(arguments.logits_out, "--logits-out", arguments)
    start.prepare(arguments.threads, quiet=arguments.quiet)
    _require_in_vocabulary(arguments, ids)
    start.require_device()
    batch = 1 if ids.ndim == 1 else len(ids)
    start.require_fit(arguments, batch, length, shorter=_shorter(arguments, length))
    with (
        progress.shown(quiet=arguments.quiet) as shown,
        start.open_engine(arguments, shown) as engine,
    ):
        logits = np.asarray(
            engine.score(ids, prefill, max_model_len=arguments.max_model_len), np.float32
        )
    nll = mean_nll(logits, ids[..., prefill:])
    is_finite = bool(np.isfinite(logits.max(axis=-1)).all())
    if not is_finite or (nll is not None and not math.isfinite(nll)):
        raise WscopeError(
            "the model's logits are not finite; look for broken weights with --check-tensors, or "
            "try --dtype float32"
        )
    out = None if arguments.logits_out is None else str(arguments.logits_out)
    values = {"nll": nll, "prefill": prefill, "logits_out": out}
    if arguments.logits_out is not None:
        try:
            answer.write_whole(arguments.logits_out, lambda stream: _save(stream, logits))
        except OSError as error:
            rest = "the logits are lost, and no half file is left; the rest of "
            answer.fail(f"--logits-out {out}", values | {"logits_out": None}, error, rest=rest)
    if arguments.json:
        answer.print_json(values)
    else:
        answer.print_line(
            "nll: no token was forced" if nll is None else f"nll {nll:.6f} nats a token"
        )
    return 0


def _save(stream: BinaryIO, logits: npt.NDArray[np.float32]) -> None:
    """Writes a .npy file; unlike `numpy.save`, which counts bytes, an error says what the system said."""
    form = np.lib.format
    form.write_array_header_1_0(stream, form.header_data_from_array_1_0(logits))
    stream.write(np.ascontiguousarray(logits).data)


def _require_in_vocabulary(arguments: argparse.Namespace, ids: Ids) -> None:
    """Checks the ids against config.json, before weights are read."""
    from wscope_jax.token_ids import check_ids

    check_ids(ids, weights.of(arguments).vocab_size(), f"--tokens {arguments.tokens}")


def _shorter(arguments: argparse.Namespace, length: int) -> str:
    """What to do where fewer tokens fit; room that was asked for beyond the text goes first."""
    is_roomy = (arguments.max_model_len or 0) > length
    return "lower --max-model-len to {}" if is_roomy else "score no more than {} tokens"


def mean_nll(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> float | None:
    """Mean negative log-likelihood in nats, None when there are no targets.

    Args:
        logits: [n + 1, V] or [B, n + 1, V]; position i predicts target i, the last one none.
        targets: [n] or [B, n] token ids.
    """
    if targets.size == 0:
        return None
    total = 0.0
    for first in range(0, targets.shape[-1], _CHUNK):
        wanted = targets[..., first : first + _CHUNK, None]
        chunk = logits[..., first : first + wanted.shape[-2], :].astype(np.float64)
        chunk -= chunk.max(axis=-1, keepdims=True)
        picked = np.take_along_axis(chunk, wanted, axis=-1)[..., 0]
        total += float((np.log(np.exp(chunk).sum(axis=-1)) - picked).sum())
    return total / targets.size
