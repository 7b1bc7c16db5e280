"""`wscope doctor`: what this machine and its installation have, what they lack, and what to do about it."""

import argparse
import io
import sys
from collections.abc import Iterator
from typing import Any, Final

from rich.table import Table

from wscope_jax.cli import answer, streams
from wscope_jax.cli.probes import FAULT, PROBES, WARNING, Finding
from wscope_jax.cli.report import AnswerConsole
from wscope_jax.errors import MachineError

_WIDE: Final = 10_000  # characters: nothing is wrapped


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns 0 if this machine can run the program.

    Raises:
        MachineError: It cannot; the report is printed first.
    """
    findings = list(examine())
    faults = [finding for finding in findings if finding.status == FAULT]
    if arguments.json:
        found = [finding._asdict() for finding in findings]
        answer.print_json({"works": not faults, "findings": found})
    else:
        with streams.printing():
            _print(findings)
    if faults:
        texts = (f"{fault.name}: {fault.value}; {fault.remedy}" for fault in faults)
        raise MachineError("; ".join(texts))
    return 0


def examine() -> Iterator[Finding]:
    """Everything that is looked at; what fails to be looked at is itself a finding."""
    for probe in PROBES:
        try:
            yield from probe()
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            yield Finding(probe.__name__.strip("_").replace("_", " "), text, WARNING, "report it")


def _print(findings: list[Finding]) -> None:
    """Prints the report; in colour where stdout is a terminal and NO_COLOR is not set."""
    styles: dict[str, Any] = {WARNING: "yellow", FAULT: "bold red"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        style = styles.get(finding.status)
        table.add_row(finding.status, finding.name, f"{finding.value}{remedy}", style=style)
    if sys.stdout.isatty():
        AnswerConsole(file=sys.stdout, highlight=False, markup=False).print(table)
        return
    # A path is to be copied: only a terminal, which has a width, gets its lines cut and filled.
    text = io.StringIO()
    AnswerConsole(file=text, highlight=False, markup=False, width=_WIDE).print(table)
    print("\n".join(map(str.rstrip, text.getvalue().splitlines())))
