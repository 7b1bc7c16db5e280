"""What a run tells about itself: the table of the four regions, and one line of figures."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn, TextIO

from rich.console import Console
from rich.table import Table

from wscope_jax.sizes import amount, counted


class AnswerConsole(Console):
    """A console whose reader may leave (`wscope plan ... | head`); rich itself would exit with 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Lets the command line end quietly."""
        raise BrokenPipeError


ROLES: Final = {
    "unpinned": ("host", "the CPU attends to it where it lies"),
    "pinned": ("host", "streamed to the device in every step"),
    "window": ("device", "the newest entries, not yet placed"),
    "ping_pong": ("device", "four small buffers through which pinned blocks pass"),
}  # of each region: where it lies, what it is for

PACE: Final = {"cpu": "CPU", "link": "link", "device": "device"}


def regions_table(regions: Mapping[str, Mapping[str, int]]) -> Table:
    """The four regions with what they hold.

    Args:
        regions: Region name -> {tokens, bytes}, as in `Result.regions`.
    """
    table = Table(title="KV cache by region")
    table.add_column("region")
    table.add_column("memory")
    table.add_column("tokens", justify="right")
    table.add_column("size", justify="right")
    table.add_column("what it is for")
    for name, held in regions.items():
        memory, role = ROLES.get(name, ("", ""))
        is_passage = (
            name == "ping_pong"
        )  # its room in one layer, where the others hold tokens of all
        tokens = "" if is_passage else f"{held['tokens']:,}"
        role += f"; room for {held['tokens']:,} tokens of one layer" if is_passage else ""
        table.add_row(name, memory, tokens, amount(held["bytes"]), role)
    return table


def summary(result: Mapping[str, Any]) -> str:
    """One line of figures: tokens and how fast they came, the CPU share, compilations.

    Args:
        result: `Result.as_dict()`.
    """
    tokens = sum(len(row) for row in result["tokens"])
    share, timing, compiles = result["cpu_share"], result["timing"], result["compiles"]
    return ", ".join(
        (
            counted(tokens, "token"),
            f"prefill {timing['prefill_s']:.2f} s ({timing['prefill_tokens_per_s']:,.0f} tokens/s)",
            f"decode {timing['decode_s']:.2f} s ({timing['decode_tokens_per_s']:,.1f} tokens/s)",
            f"CPU share {share['first']:.2f} -> {share['last']:.2f}",
            *_pace(result["work"]),
            f"compiles {compiles['warmup']} warm-up, {compiles['ahead']} ahead, "
            f"{compiles['stall']} stall",
        )
    )


def _pace(work: Mapping[str, Any]) -> list[str]:
    """Who set the pace, and what the link brought; nothing where no step was timed."""
    if work["limit"] is None:
        return []
    late_s = work["wait_cpu_s"] if work["limit"] == "cpu" else work["wait_link_s"]
    waited = f", waited for {late_s:.2f} s" * (work["limit"] != "device")
    return [
        f"pace set by the {PACE[work['limit']]}{waited}",
        f"{amount(work['link_bytes'])} streamed",
    ]


def print_regions(regions: Mapping[str, Mapping[str, int]], out: TextIO) -> None:
    """Prints the table; in colour where `out` is a terminal and NO_COLOR is not set."""
    AnswerConsole(file=out, highlight=False).print(regions_table(regions))


def print_summary(result: Mapping[str, Any], out: TextIO) -> None:
    """Prints the line of figures.

    Args:
        result: `Result.as_dict()`.
        out: Where to.
    """
    print(f"wscope: {summary(result)}", file=out, flush=True)
