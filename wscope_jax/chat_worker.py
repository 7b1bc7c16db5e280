"""Renders chat templates: a program of its own, which the package never imports.

A template comes with a checkpoint, so it is not trusted: it runs in jinja2's sandbox, in a process that may take little
time and memory and can write nothing but its answer. Reads one JSON object from stdin; for each conversation it prints
a line of JSON, [kind, text]: kind is "text", or what went wrong.
"""

import datetime
import json
import resource
import signal
import sys
from typing import Any, Final, NoReturn

MEMORY_BYTES: Final = 512 << 20
OLDEST_JINJA: Final = (3, 1, 6)  # before it, `|attr` reached str.format and with it everything


class RefusedError(Exception):
    """The template itself says that it cannot render this conversation."""


def main() -> None:
    """Answers the request on stdin."""
    request = json.load(sys.stdin)
    try:
        import jinja2
    except ImportError:
        say("missing", "it is not installed")
        return
    found = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if found < OLDEST_JINJA:
        say("missing", f"version {jinja2.__version__} is installed")
        return
    signal.signal(
        signal.SIGALRM, signal.SIG_DFL
    )  # no handler: the system ends this process, whatever it does
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for conversation in request["conversations"]:
        signal.setitimer(signal.ITIMER_REAL, request["deadline_s"])
        answer = render(
            request["template"],
            {**request["variables"], **conversation["variables"]},
            conversation["most"],
        )
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(*answer)


def say(kind: str, text: str) -> None:
    """Prints one line of the answer."""
    sys.stdout.write(json.dumps([kind, text]) + "\n")
    sys.stdout.flush()


def render(template: str, variables: dict[str, Any], most: int) -> tuple[str, str]:
    """The text of one conversation, at most `most` characters, or what went wrong."""
    import jinja2

    try:
        parts, length = [], 0
        for part in environment().from_string(template).generate(**variables):
            length += len(part)
            if length > most:
                return "large", ""
            parts.append(part)
        return "text", "".join(parts)
    except jinja2.TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except jinja2.exceptions.SecurityError as error:
        return "forbidden", str(error)
    except RefusedError as error:
        return "refused", str(error)
    except MemoryError:
        return "large", ""
    except Exception as error:  # a template can raise anything
        return "failed", f"{type(error).__name__}: {error}"


def environment() -> Any:
    """The sandbox, with what templates of published checkpoints use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that marks an assistant's tokens for training: its content, nothing else."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON as it is; jinja2's own filter escapes it for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def raise_exception(text: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    raise RefusedError(text)


if __name__ == "__main__":
    main()
