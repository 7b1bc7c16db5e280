"""`wscope plan`: the bytes of every region for a model, a batch and a length, and the largest that fit."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from wscope_jax import machine
from wscope_jax.cli import answer, report, start, streams
from wscope_jax.cli.report import AnswerConsole
from wscope_jax.sizes import amount

if TYPE_CHECKING:
    from wscope_jax.configurations import Configuration
    from wscope_jax.layout import EntryLayout
    from wscope_jax.memory_plan import Plan, StreamPlan

log = logging.getLogger(__name__)

_ROLES: Final = {
    **report.ROLES,
    "spare": ("both", "rings beyond the window, buffers on the way"),
    "weights": ("device", ""),
}


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns 0 if the table could be computed.

    Raises:
        WscopeError: What was wrong, with its exit code.
        CapacityError: With `--check`, if it does not fit.
    """
    start.prepare()
    from wscope_jax import configurations, policies

    policy = policies.choose(arguments.policy, arguments.cpu_share)
    model = configurations.read(arguments.model, arguments.dtype)
    max_len = arguments.max_model_len or model.position_limit
    plan = start.plan(arguments, policy, model, arguments.batch, max_len, _gpu_memory(arguments))
    if max_len > model.position_limit:
        log.warning(
            "%d tokens exceed the %d positions that the model was made for; text beyond may degrade",
            max_len,
            model.position_limit,
        )
    if arguments.json:
        answer.print_json(as_dict(plan))
    else:
        with streams.printing():
            notes = (
                *_assumptions(plan, model, arguments),
                *_sources(plan, arguments),
                *_spare(plan, arguments),
            )
            _print(plan, model, notes)
    if arguments.check:
        _require_fit(plan)
    return 0


def _require_fit(plan: "Plan") -> None:
    plan.require_fit(
        shorter="lower --max-model-len to {}",
        fewer="lower --batch to {}",
        roomier="lower --spare-memory to {}",
        larger={
            "host": "raise --host-memory",
            "gpu": "raise --gpu-memory",
            "machine": "give --host-memory and --gpu-memory to plan for another machine",
        },
    )


def _gpu_memory(arguments: argparse.Namespace) -> int | None:
    """The GPU's budget; None without a GPU."""
    if arguments.gpu_memory is not None or not machine.expects_gpu():
        return arguments.gpu_memory  # type: ignore[no-any-return]
    return machine.gpus()[0].free


def _sources(plan: "Plan", arguments: argparse.Namespace) -> Iterator[str]:
    """Where the budgets come from that the user has not given."""
    if plan.gpu_memory is None:
        yield "GPU budget: none, there is no GPU here (--gpu-memory plans for one)"
    elif arguments.gpu_memory is None:
        yield f"GPU budget: what is free on the {machine.gpus()[0].name}, {amount(plan.gpu_memory)}"
    memory = machine.memory()
    limit = "" if memory.limit is None else f", its cgroup's limit is {amount(memory.limit)}"
    left = f"what this machine has left ({amount(memory.room)}{limit}) but for a margin"
    if plan.machine_memory is not None:
        yield f"budget of everything, without a GPU: {amount(plan.machine_memory)}, {left}"
    elif arguments.host_memory is None and plan.host_memory is not None:
        yield f"host budget: {amount(plan.host_memory)}, {left}"


def _spare(plan: "Plan", arguments: argparse.Namespace) -> Iterator[str]:
    """What the windows keep beyond D, and what they could."""
    size, most = plan.footprint, plan.largest_spare
    if arguments.spare_memory and not size.spare_block_bytes:
        yield f"--spare-memory: of no use with policy {plan.policy.name}, whose windows keep everything"
    elif arguments.spare_memory:
        step = amount(size.spare_block_bytes)
        yield (
            f"--spare-memory: windows keep {size.spare_blocks * size.window:,} tokens of each sequence beyond D; "
            f"{size.window} of each are {step}"
        )
    if plan.gpu_memory is None or most <= size.spare_blocks:
        return
    megabytes = -(-most * size.spare_block_bytes // 10**6)
    roomy = dataclasses.replace(size, spare_memory=megabytes * 10**6)
    is_enough = not plan.fits and dataclasses.replace(plan, footprint=roomy).fits
    yield (
        f"GPU budget: --spare-memory {megabytes}MB would keep {most * size.window:,} tokens of each sequence there, "
        f"beyond D{'; then it fits' if is_enough else ''}"
    )


def _assumptions(
    plan: "Plan", model: "Configuration", arguments: argparse.Namespace
) -> Iterator[str]:
    """What the figures rest on and a reader may not guess."""
    if not model.has_model:
        yield f"{model.model_type}: layouts and counts only, this package cannot run it yet"
    if plan.policy.name == "resident" and start.is_auto(arguments):
        yield "policy auto: the GPU holds the whole cache and keeps it there (resident)"
    if plan.policy.uses_host and plan.policy.uses_link and arguments.cpu_share is None:
        yield (
            "CPU share: one half is taken here, a run measures its own; "
            "the sum of both host regions does not depend on it"
        )


def _layer_dict(plan: "Plan", layer: "tuple[StreamPlan, ...]") -> dict[str, Any]:
    return {
        "bytes": {
            name: sum(planned.bytes[name] for planned in layer)
            for name in ("unpinned", "pinned", "window", "spare")
        },
        "streams": [
            {
                "kind": planned.stream.kind,
                **dataclasses.asdict(planned.stream.layout),
                "entry_bytes": plan.footprint.entry_bytes(planned.stream),
                "bytes": planned.bytes,
            }
            for planned in layer
        ],
    }


def as_dict(plan: "Plan") -> dict[str, Any]:
    """Plain dicts, lists and numbers, as `--json` prints them."""
    return {
        "bytes": plan.bytes,
        "bytes_per_token": plan.bytes_per_token,
        "layers": [_layer_dict(plan, layer) for layer in plan.layers],
        "fits": plan.fits,
        "short_by": plan.short_by,
        "why": plan.why,
        "largest_context": plan.largest_context,
        "largest_batch": plan.largest_batch,
        "position_limit": plan.position_limit,
        "margin": plan.margin,
        "budgets": {
            "host": plan.host_memory,
            "gpu": plan.gpu_memory,
            "machine": plan.machine_memory,
        },
    }


# --- tables ---------------------------------------------------------------------------------------


def _print(plan: "Plan", model: "Configuration", notes: Sequence[str]) -> None:
    """Prints tables and verdict; in colour where stdout is a terminal and NO_COLOR is not set."""
    console = AnswerConsole(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(_regions_table(plan, model))
    console.print()
    console.print(_layers_table(plan))
    console.print()
    for note in notes:
        print(note)
    print("\n".join(_verdict(plan)))


def _regions_table(plan: "Plan", model: "Configuration") -> Table:
    size = plan.footprint
    title = (
        f"{model.name}: {size.batch} x {size.max_len:,} tokens, {model.dtype}, window {size.window}"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("what")
    table.add_column("memory")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what it is for")
    for name, num_bytes in plan.bytes.items():
        memory, role = _ROLES[name]
        if name == "weights":
            role = f"{model.num_parameters:,} parameters"
        table.add_row(name, memory, amount(num_bytes), role)
    if plan.margin:
        table.add_row("margin", "device", amount(plan.margin), "programs and activations")
    return table


def _layers_table(plan: "Plan") -> Table:
    title = f"per layer ({amount(plan.bytes_per_token)} a token in all layers)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    names = ("unpinned", "pinned", "window", "spare")
    table.add_column("layers")
    for column in ("stream", "entry"):
        table.add_column(column, no_wrap=True)
    for column in names:
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, ...], tuple[list[int], tuple[StreamPlan, ...]]] = {}
    for index, layer in enumerate(plan.layers):
        key = tuple(str(planned.stream) for planned in layer)
        groups.setdefault(key, ([], layer))[0].append(index)
    for indices, layer in groups.values():
        where = spans(indices)
        for planned in layer:
            sizes = [amount(planned.bytes[name]) for name in names]
            table.add_row(where, planned.stream.kind, shape(planned.stream.layout), *sizes)
            where = ""
    return table


def _verdict(plan: "Plan") -> Iterator[str]:
    if plan.fits:
        yield "fits"
    else:
        yield f"DOES NOT FIT, short by {amount(plan.short_by)}: {plan.why}"
    size = plan.footprint
    contexts = _limit(plan.largest_context, "tokens each")
    limit = plan.position_limit
    if limit is not None and (plan.largest_context or limit + 1) > limit:
        contexts += f"; the model was made for {limit:,}"
    yield f"largest context at batch {size.batch}: {contexts}"
    yield f"largest batch at {size.max_len:,} tokens each: {_limit(plan.largest_batch)}"


def _limit(size: int | None, unit: str = "") -> str:
    if size is None:
        return "not limited by memory"
    return f"{size:,} {unit}".rstrip() if size else "none fits"


def shape(layout: "EntryLayout") -> str:
    """What an entry is made of, short."""
    value = "" if layout.value_in_key else f"+{layout.value_dim}"
    text = f"{layout.num_kv_heads} x {layout.key_dim}{value}"
    if layout.tokens_per_entry > 1:
        text += f" per {layout.tokens_per_entry}"
    return text


def spans(indices: Sequence[int]) -> str:
    """Numbers of layers, short: "0-47", "2, 4 .. 42"."""
    if len(indices) < 3:
        return ", ".join(map(str, indices))
    step = indices[1] - indices[0]
    if list(indices) == list(range(indices[0], indices[-1] + 1, step)):
        first = f"{indices[0]}-" if step == 1 else f"{indices[0]}, {indices[1]} .. "
        return f"{first}{indices[-1]}"
    return f"{', '.join(map(str, indices[:4]))} .. {indices[-1]}"
