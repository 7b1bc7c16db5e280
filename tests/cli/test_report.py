"""What a run tells about itself."""

import io

from wscope_jax.cli import report

REGIONS = {
    "unpinned": {"tokens": 6656, "bytes": 6_656_000},
    "pinned": {"tokens": 2048, "bytes": 2_048_000},
    "window": {"tokens": 137, "bytes": 137_000},
    "ping_pong": {"tokens": 4096, "bytes": 1_024_000},
}


def test_tokens_of_the_table_can_be_added() -> None:
    """PING-PONG holds none of them: its room is told in words."""
    out = io.StringIO()
    report.print_regions(REGIONS, out)
    passage = next(line for line in out.getvalue().splitlines() if "ping_pong" in line)
    cells = [cell.strip() for cell in passage.strip("│ ").split("│")]
    assert cells[:4] == ["ping_pong", "device", "", "1.024 MB"]
    assert "4,096 tokens of one layer" in " ".join(out.getvalue().replace("│", " ").split())
