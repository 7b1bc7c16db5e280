"""`wscope inspect`: what a checkpoint holds, by its headers alone, and whether it is whole."""

import argparse
import collections
import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from wscope_jax.cli import answer, start, streams, weights
from wscope_jax.cli.report import AnswerConsole
from wscope_jax.errors import CheckpointError
from wscope_jax.sizes import amount

if TYPE_CHECKING:
    from wscope_jax.checkpoint import Checkpoint, Stored
    from wscope_jax.models.config import ModelConfig

_SHOWN: Final = 20  # names of each kind of fault that the table lists; the rest is counted


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns 0 if `generate` would take this checkpoint.

    Raises:
        CheckpointError: Anything is wrong with it; what could be found out is printed first.
    """
    weights.require_directory(arguments.model)
    start.prepare()
    from wscope_jax.checkpoint import Checkpoint, locate
    from wscope_jax.models import read_config
    from wscope_jax.tokenizer import FILE_NAME

    checkpoint = Checkpoint(arguments.model)
    values = _describe_files(checkpoint.directory, checkpoint.tensors)
    try:
        values["tokenizer"] = locate(checkpoint.directory, FILE_NAME) is not None
        values |= _describe_model(read_config(arguments.model), checkpoint)
        faults = [f"{len(values[kind])} {kind} tensors" for kind in _FAULTS if values[kind]]
        if faults:
            text = f"{checkpoint.directory}: {', '.join(faults)}"
            values["problem"] = f"{text}; its files and its config.json do not belong together"
    except CheckpointError as error:  # a family that is unknown, a key that is not honoured
        values["problem"] = str(error)
    if arguments.json:
        answer.print_json(values)
    else:
        with streams.printing():
            _print(values)
    if values["problem"] is not None:
        raise CheckpointError(values["problem"])
    return 0


_FAULTS: Final = ("missing", "unexpected", "misshapen", "unreadable")


def _describe_files(root: Path, tensors: "Mapping[str, Stored]") -> dict[str, Any]:
    from wscope_jax.configurations import stored_bytes

    shards: dict[str, list[Stored]] = {}
    dtypes: dict[str, collections.Counter[str]] = {}
    for tensor in tensors.values():
        shards.setdefault(tensor.file.name, []).append(tensor)
        counts = dtypes.setdefault(tensor.dtype, collections.Counter())
        counts.update(tensors=1, parameters=math.prod(tensor.shape), bytes=stored_bytes(tensor))
    return {
        "model": str(root),
        "problem": None,
        "shards": [
            {
                "file": file,
                "tensors": len(shards[file]),
                "bytes": sum(map(stored_bytes, shards[file])),
            }
            for file in sorted(shards)
        ],
        "dtypes": {name: dict(counts) for name, counts in sorted(dtypes.items())},
        "tensors": len(tensors),
        "parameters": sum(counts["parameters"] for counts in dtypes.values()),
        "bytes": sum(counts["bytes"] for counts in dtypes.values()),
        "tokenizer": False,
        "config": None,
        **{kind: [] for kind in _FAULTS},
    }


def _describe_model(config: "ModelConfig", checkpoint: "Checkpoint") -> dict[str, Any]:
    """The configuration's main figures, and the tensors that do not fit it."""
    from wscope_jax import models

    tensors, match = checkpoint.tensors, checkpoint.match(models.places(config, checkpoint))
    figures = {
        key: value
        for key, value in dataclasses.asdict(config).items()
        if isinstance(value, int | float | str)
    }
    return {
        "config": figures,
        "missing": [piece.name for piece in match.missing],
        "unexpected": match.unexpected,
        "misshapen": [
            f"{piece.name} {list(tensors[piece.name].shape)}, expected {list(piece.shape)}"
            for piece in match.misshapen
        ],
        "unreadable": [f"{piece.name} ({tensors[piece.name].dtype})" for piece in match.unreadable],
    }


def _print(values: Mapping[str, Any]) -> None:
    console = AnswerConsole(file=sys.stdout, highlight=False, soft_wrap=True)
    table = Table(title=values["model"], title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("file")
    for column in ("tensors", "size"):
        table.add_column(column, justify="right")
    for shard in values["shards"]:
        table.add_row(shard["file"], f"{shard['tensors']:,}", amount(shard["bytes"]))
    console.print(table)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("dtype")
    for column in ("tensors", "parameters", "size"):
        table.add_column(column, justify="right")
    rows = {**values["dtypes"], "all": values} if len(values["dtypes"]) > 1 else values["dtypes"]
    for name, counts in rows.items():
        counted = (f"{counts['tensors']:,}", f"{counts['parameters']:,}", amount(counts["bytes"]))
        table.add_row(name, *counted)
    console.print(table)
    print()
    for key, value in (values["config"] or {}).items():
        print(f"{key}: {value}")
    print("tokenizer.json: " + ("there" if values["tokenizer"] else "missing; --tokens works"))
    for kind in _FAULTS:
        names = values[kind]
        if names:
            print(f"{kind} tensors: {len(names)}")
            print("".join(f"  {name}\n" for name in names[:_SHOWN]), end="")
            if len(names) > _SHOWN:
                print(f"  ... and {len(names) - _SHOWN} more")
    if values["problem"] is None:
        print("whole: every tensor of the family is there, and no other")
