"""What ends the command on Ctrl-C and SIGTERM until the command line, which takes time to import, does so itself."""

import os
import signal
from types import FrameType
from typing import Final, NoReturn

EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORDS: Final = {130: "interrupted", 143: "terminated"}


def end_at_once() -> None:
    """From now on either signal ends the process where it is, with one line; one that is ignored stays so."""
    for number in EXIT_CODES:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    code = EXIT_CODES[signal.Signals(number)]
    try:
        os.write(2, f"wscope: {WORDS[code]}\n".encode())
    finally:  # a closed stderr, too
        os._exit(code)
