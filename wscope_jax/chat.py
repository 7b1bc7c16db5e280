"""A checkpoint's chat template: found in its files, rendered in a process of its own (`chat_worker`)."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wscope_jax.checkpoint import locate, open_directory, read_json, show, unreadable
from wscope_jax.errors import CheckpointError, MachineError, UsageError

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
DEFAULT: Final = "default"  # name of the template where a checkpoint has several
TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
MOST_TEMPLATE_BYTES: Final = 1 << 20
DEADLINE_S: Final = 1.0  # for one conversation
START_S: Final = 60.0  # for the process to start, on a busy machine
WORKER: Final = Path(__file__).with_name("chat_worker.py")

Message = Mapping[str, str]
Conversation = Sequence[Message]


class ChatTemplate:
    """Turns conversations into prompts.

    Attributes:
        path: file that the template is in.
    """

    def __init__(self, text: str, path: Path, variables: Mapping[str, str]) -> None:
        self.path = path
        self._text = text
        self._variables = dict(variables)

    @classmethod
    def from_dir(cls, directory: Path, name: str | None = None) -> "ChatTemplate":
        """The template of a checkpoint directory.

        Args:
            directory: the checkpoint.
            name: which one, where it has several; None = "default".

        Raises:
            CheckpointError: It has none, or its files are broken.
            UsageError: It has none of that name.
        """
        directory = open_directory(directory)
        config_path = locate(directory, CONFIG_FILE)
        config = {} if config_path is None else read_json(config_path)
        path = locate(directory, TEMPLATE_FILE)
        if path is not None and name in (None, DEFAULT):
            return cls(_read(path), path, _variables(config))
        is_alone = config_path is None or config.get("chat_template") is None
        if path is not None and is_alone:
            raise UsageError(
                f"--chat-template {show(name)}: {path} is the only one, which is called {show(DEFAULT)}; "
                "leave the option out"
            )
        if config_path is None or is_alone:
            raise CheckpointError(
                f"{directory}: no chat template (neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}); "
                "this is a base model: give it plain prompts (no --chat, no messages)"
            )
        text = _choose(config["chat_template"], name or DEFAULT, config_path)
        return cls(text, config_path, _variables(config))

    def render(self, conversations: Sequence[Conversation], names: Sequence[str]) -> list[str]:
        """The prompts of conversations, each with the beginning of an answer.

        Args:
            conversations: messages of each, with "role" and "content".
            names: what messages call each conversation.

        Raises:
            CheckpointError: The template is wrong, does what it may not, or takes too long or too much.
            UsageError: The template refuses a conversation.
            MachineError: jinja2 is missing or too old.
        """
        request = {
            "template": self._text,
            "variables": {
                **self._variables,
                "add_generation_prompt": True,
                "tools": None,
                "documents": None,
            },
            "deadline_s": DEADLINE_S,
            "conversations": [
                {"variables": {"messages": list(map(dict, each))}, "most": self._most(each)}
                for each in conversations
            ],
        }
        answers, end = _ask(request)
        for (kind, text), name in zip(answers, names, strict=False):
            self._check(kind, text, name)
        if len(answers) < len(conversations):
            why = (
                f"did not end within {DEADLINE_S:g} s"
                if end in (-signal.SIGALRM, None)
                else f"ended its process (exit code {end})"
            )
            raise CheckpointError(f"{self.path}: the chat template {why}; {_remedy}")
        return [text for _, text in answers]

    def _most(self, conversation: Conversation) -> int:
        size = len(self._text) + sum(
            len(value) for message in conversation for value in message.values()
        )
        return 4 * size + (1 << 20)

    def _check(self, kind: str, text: str, name: str) -> None:
        text = " ".join(text.split())[:200]
        if kind == "text":
            return
        if kind == "missing":
            raise MachineError(
                f"chat templates need jinja2 3.1.6 or later; {text}: pip install 'wscope-jax[chat]'"
            )
        if kind == "refused":
            raise UsageError(f"{name}: the chat template of {self.path} refuses this: {text}")
        what = {
            "syntax": f"is wrong in {text}",
            "forbidden": f"does what the sandbox forbids ({text})",
            "large": "makes more than 4 times its input and 1 MiB",
        }.get(kind, f"failed ({text})")
        raise CheckpointError(f"{self.path}: the chat template {what}; {_remedy}")


_remedy: Final = "fetch it again from where the checkpoint came from, or give a plain prompt"


def _ask(request: object) -> tuple[list[list[str]], int | None]:
    """The worker's answers, and its exit code: None if it had to be killed."""
    deadline_s = START_S + DEADLINE_S
    command = [sys.executable, "-P", str(WORKER)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=deadline_s * max(1, len(request["conversations"])),  # type: ignore[index]
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return _lines(error.stdout or b""), None
    except OSError as error:
        raise MachineError(
            f"chat template: no process for it: {error.strerror}; raise the limit on processes (ulimit -u)"
        ) from error
    return _lines(done.stdout), done.returncode


def _lines(raw: bytes) -> list[list[str]]:
    return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_TEMPLATE_BYTES + 1)
        if len(raw) > MOST_TEMPLATE_BYTES:
            raise CheckpointError(f"{path}: larger than 1 MiB; no chat template is")
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}; {_remedy}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _choose(found: Any, name: str, path: Path) -> str:
    """The template called `name` of a single text, or of a list of {"name", "template"}."""
    if isinstance(found, str):
        found = [{"name": DEFAULT, "template": found}]
    known: dict[str, str] = {}
    for entry in found if isinstance(found, list) else [found]:
        fields = entry if isinstance(entry, dict) else {}
        key, text = fields.get("name"), fields.get("template")
        if not isinstance(key, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{path}: chat_template holds {show(entry)}; expected a text, or a list of name and template"
            )
        known[key] = text
    if name not in known:
        names = ", ".join(map(show, known)) or "none"
        raise UsageError(f"--chat-template {show(name)}: {path} has {names}; choose one of them")
    return known[name]


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is a text, or an object with its content."""
    found = {}
    for key in TOKENS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found
