"""The text that the demo model is trained on: English prose that ships with Python itself.

The topics of `pydoc`, then docstrings and longer comments of the standard library. Some topics and some modules are
held out; the held-out topics are also the bundled prose of `wscope demo`.
"""

import ast
import pydoc_data.topics
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from wscope_jax import demo_text

HELD_OUT_TOPICS: Final = (
    *("objects", "import", "calls", "raise", "typesmapping", "global", "dict", "assert"),
    *("slicings", "debugger"),
)
HELD_OUT_MODULES: Final = 16  # one module in so many
MIN_PARAGRAPH: Final = 60  # characters of a docstring or comment that is worth having
MIN_LETTERS: Final = 0.85  # share of letters and white space in prose
PLAIN: Final = str.maketrans(
    {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2026: "...", 0x2013: "-", 0x2014: "-"}
)


class Corpus(NamedTuple):
    """ASCII texts, each a series of paragraphs.

    Attributes:
        train: what the model learns from.
        modules: docstrings and comments of the modules that were held out.
        prose: the topics that were held out.
    """

    train: str
    modules: str
    prose: str


def read(directory: Path | None = None) -> Corpus:
    """The corpus of the running Python, or the one that `write` left in a directory."""
    if directory is not None:
        return Corpus(*((directory / f"{name}.txt").read_text("ascii") for name in Corpus._fields))
    topics = {name: _plain(text) for name, text in sorted(pydoc_data.topics.topics.items())}
    prose = "\n\n".join(topics.pop(name, "").strip() for name in HELD_OUT_TOPICS) + "\n"
    seen = set(_paragraphs(prose))
    held_out, train = [], []
    for name, text in _modules():
        kept = held_out if zlib.crc32(name.encode()) % HELD_OUT_MODULES == 0 else train
        kept.append(text)
    modules = _unseen("\n\n".join(held_out), seen)
    return Corpus(_unseen("\n\n".join([*topics.values(), *train]), seen), modules, prose)


def bundled() -> Corpus:
    """The package's own prose as all three texts, to try the training out."""
    return Corpus(*[demo_text.prose()] * len(Corpus._fields))


def write(corpus: Corpus, directory: Path) -> None:
    """Leaves the corpus in a directory, for a machine with another Python."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in corpus._asdict().items():
        (directory / f"{name}.txt").write_text(text, "ascii")


def _modules() -> Iterator[tuple[str, str]]:
    """The prose of each module of the standard library, by its path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages", "dist-packages", "lib2to3/tests", "pydoc_data")):
            continue
        try:
            source = path.read_text("utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):  # tests of the compiler
            continue
        texts = [_plain(text) for text in (*_docstrings(tree), *_comments(source))]
        kept = [text for text in texts if len(text) >= MIN_PARAGRAPH and _is_prose(text)]
        yield name, "\n\n".join(kept)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def _comments(source: str) -> Iterator[str]:
    """Comments of two lines or more."""
    lines: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#"):
            lines.append(stripped.lstrip("#").removeprefix(" "))
            continue
        if len(lines) > 1:
            yield "\n".join(lines)
        lines = []


def _is_prose(text: str) -> bool:
    letters = sum(letter.isalpha() or letter in " \n" for letter in text)
    return letters >= MIN_LETTERS * len(text)


def _plain(text: str) -> str:
    """The text in ASCII, without tabs and trailing blanks."""
    text = text.translate(PLAIN).encode("ascii", "ignore").decode()
    return "\n".join(line.rstrip() for line in text.expandtabs().splitlines()).strip("\n")


def _paragraphs(text: str) -> Iterator[str]:
    return (paragraph.strip("\n") for paragraph in text.split("\n\n"))


def _unseen(text: str, seen: set[str]) -> str:
    """The paragraphs that were not seen before, short ones in any case; adds them to those seen."""
    kept = []
    for paragraph in _paragraphs(text):
        if paragraph and (len(paragraph) < MIN_PARAGRAPH or paragraph not in seen):
            seen.add(paragraph)
            kept.append(paragraph)
    return "\n\n".join(kept) + "\n"
