"""Messages name what the user typed: a Python parameter in the library's text becomes the option that set it."""

import re
from collections.abc import Iterable, Sequence

_options: dict[str, str] = {}  # of the running command: parameter -> option


def learn(parameters: Iterable[str], words: Sequence[str]) -> None:
    """Takes the options of the command that begins; those of an earlier one are forgotten.

    Args:
        parameters: Of the chosen verb, as Python spells them.
        words: The command line. A name that is also an ordinary word (`window`, `prompt`) means the option only if that
            was given; one with an underscore means nothing else.
    """
    typed = {word.partition("=")[0] for word in words}
    spelled = {name: "--" + name.replace("_", "-") for name in parameters}
    _options.clear()
    _options.update(
        (name, option) for name, option in spelled.items() if "_" in name or option in typed
    )


def spell(text: str) -> str:
    """The text with the option in the place of a parameter that it begins with, or gives as `name=3`."""
    head, colon, rest = text.partition(":")
    return re.sub(r"(?<= )([a-z_]+)=(?=\d)", _assigned, f"{_options.get(head, head)}{colon}{rest}")


def _assigned(match: re.Match[str]) -> str:
    option = _options.get(match[1])
    return match[0] if option is None else f"{option} "
