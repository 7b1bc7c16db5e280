"""What fits: the bytes of every region of a cache, before anything is allocated."""

import dataclasses
from collections.abc import Sequence

from wscope_jax.errors import CapacityError, UsageError
from wscope_jax.layout import WINDOW_SIZES, WINDOW_SPARE, Region, Stream
from wscope_jax.policies import Policy


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of a cache for a batch of sequences of one length.

    Attributes:
        bytes: by region name ("unpinned", "pinned", "window", "ping_pong") and "spare" (ring entries beyond the
            window's D, and what a resident window holds beyond D).
        bytes_per_token: of one token in all layers.
        host_memory: budget for both host regions, or None if there is none.
        short_by: bytes that the host regions exceed their budget by; 0 if they fit.
    """

    bytes: dict[str, int]
    bytes_per_token: int
    host_memory: int | None
    short_by: int

    @property
    def fits(self) -> bool:
        """Whether the budget holds the host regions."""
        return self.short_by == 0

    def require_fit(self) -> None:
        """Raises CapacityError with what is missing if the plan does not fit."""
        if self.fits:
            return
        needed = self.bytes[Region.UNPINNED] + self.bytes[Region.PINNED]
        raise CapacityError(
            f"host memory: the placed blocks take {needed} bytes, the budget is {self.host_memory}: short by "
            f"{self.short_by} bytes; raise --host-memory, or lower --max-model-len or the number of prompts"
        )


def plan(
    streams: Sequence[Sequence[Stream]],
    *,
    policy: Policy,
    batch: int,
    max_len: int,
    window: int = 256,
    itemsize: int = 2,
    host_memory: int | None = None,
    chunk_entries: int = 16_384,
) -> Plan:
    """Bytes by region when every row has `max_len` tokens.

    Args:
        streams: per layer what it stores.
        policy: places the blocks; its share splits the host regions.
        batch: rows.
        max_len: tokens of each row.
        window: D.
        itemsize: bytes of a stored number.
        host_memory: budget for both host regions, in bytes.
        chunk_entries: entries of one layer in a streamed chunk.

    Raises:
        UsageError: an impossible size.
    """
    if window not in WINDOW_SIZES:
        raise UsageError(f"window: expected one of {WINDOW_SIZES}, got {window}")
    if batch < 1 or max_len < 1:
        raise UsageError(f"batch, max_len: expected at least 1, got {batch}, {max_len}")
    entry = [stream.layout.entry_bytes(itemsize) for layer in streams for stream in layer]
    per_token = sum(entry)
    places = policy.uses_host or policy.uses_link
    blocks = batch * (max_len // window) if places else 0
    unpinned = round(policy.cpu_share(blocks * window) * blocks) if places else 0
    chunk = min(chunk_entries, -(-batch * max_len // window) * window)
    spare = WINDOW_SPARE if places else max(0, -(-max_len // window) * window - window)
    slot = window * per_token
    sizes = {
        Region.UNPINNED: unpinned * slot,
        Region.PINNED: (blocks - unpinned) * slot,
        Region.WINDOW: batch * slot,
        Region.PING_PONG: 2 * chunk * max(entry, default=0) if policy.uses_link else 0,
    }
    needed = blocks * slot
    return Plan(
        bytes={
            **{region.value: size for region, size in sizes.items()},
            "spare": batch * spare * per_token,
        },
        bytes_per_token=per_token,
        host_memory=host_memory,
        short_by=0 if host_memory is None else max(0, needed - host_memory),
    )
