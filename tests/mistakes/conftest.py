from collections.abc import Iterator

import pytest

from tests.mistakes import commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `commands.wscope` run in this process."""
    with commands.in_process(monkeypatch):
        yield
