"""Sizes of everything that a cache holds: the one arithmetic by which it is planned and by which it allocates."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from wscope_jax.arguments import integer, shown
from wscope_jax.errors import CapacityError, UsageError
from wscope_jax.layout import PING_PONG_SLOTS, WINDOW_SPARE, Stream, check_window
from wscope_jax.search import largest

# Entries of one layer in a streamed chunk; four are the paper's PING-PONG at batch 32.
CHUNK_ENTRIES: Final = 8_192
MOST: Final = (1 << 31) - 1  # tokens of a row, and rows: positions are int32
LAYERS_IN_FLIGHT: Final = 2  # prefill layers whose entries may be alive outside their home

Layers = tuple[tuple[Stream, ...], ...]


def moves_under_way(batch: int) -> int:
    """Rows whose blocks may be on their way out of the window at the same time.

    Rows of equal length fall due in the same step: they are spread over half of the spare ring entries, and a move may
    take longer than a step.
    """
    return max(2, -(-4 * batch // WINDOW_SPARE))


@dataclasses.dataclass(frozen=True)
class PlannedStream(Stream):
    """A stream as a plan knows it: of kinds, too, that no cache holds yet.

    Attributes:
        kind: "placed"; "resident" (stays on the device and grows with the text); "sliding(n)" (a ring of the last n
            entries on the device).
    """

    def __post_init__(self) -> None:
        if not re.fullmatch(r"placed|resident|sliding\([1-9][0-9]*\)", self.kind):
            raise UsageError(
                f"kind: expected 'placed', 'resident' or 'sliding(n)', got {shown(self.kind)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """A cache for `batch` rows of `max_len` tokens each, in bytes.

    Attributes:
        streams: per layer what it stores.
        batch: rows.
        max_len: tokens of each row.
        window: D.
        itemsize: bytes of a stored number.
        uses_host: programs attend to UNPINNED.
        uses_link: programs stream PINNED.
        chunk_entries: entries of one layer in a streamed chunk.
        spare_memory: bytes on the device that windows may take beyond D, in whole blocks of all rows and layers.

    Raises:
        UsageError: an impossible size.
    """

    streams: Layers
    batch: int
    max_len: int
    window: int
    itemsize: int
    uses_host: bool
    uses_link: bool
    chunk_entries: int = CHUNK_ENTRIES
    spare_memory: int = 0

    def __post_init__(self) -> None:
        check_window(self.window)
        for name in ("batch", "max_len", "itemsize", "chunk_entries"):
            integer(name, getattr(self, name), 1, MOST)
        integer("spare_memory", self.spare_memory, 0)

    def is_placed(self, stream: Stream) -> bool:
        """Whether full blocks of the stream go to host memory."""
        return stream.kind == "placed" and (self.uses_host or self.uses_link)

    def entry_bytes(self, stream: Stream) -> int:
        """Bytes of one entry of one layer."""
        return stream.layout.entry_bytes(self.itemsize)

    @functools.cached_property
    def spare_block_bytes(self) -> int:
        """Bytes of one block of every row, in all layers: by so much the windows grow at a time."""
        placed = (num * self.block_bytes(s) for s, num in self._counts() if self.is_placed(s))
        return self.batch * sum(placed)

    @functools.cached_property
    def spare_blocks(self) -> int:
        """Blocks that the window of a row keeps beyond D before it gives its oldest one away."""
        whole = [self._whole_blocks(s) for s, _ in self._counts() if self.is_placed(s)]
        return min(max(whole), self.spare_memory // self.spare_block_bytes) if whole else 0

    def _whole_blocks(self, stream: Stream) -> int:
        return self.max_len // stream.layout.tokens_per_entry // self.window

    def row_blocks(self, stream: Stream) -> int:
        """Blocks of a row that are in host memory when the row is full."""
        if not self.is_placed(stream):
            return 0
        return max(0, self._whole_blocks(stream) - self.spare_blocks)

    def ring_entries(self, stream: Stream) -> int:
        """Entries of a row that the device has room for."""
        if stream.kind.startswith("sliding"):
            return int(stream.kind[8:-1])
        if self.is_placed(stream):
            return self.window * (1 + self.spare_blocks) + WINDOW_SPARE
        entries = -(-self.max_len // stream.layout.tokens_per_entry)
        return -(-entries // self.window) * self.window

    def window_bytes(self, stream: Stream) -> int:
        """Bytes of the newest D entries of all rows (of a whole sliding ring), one layer."""
        ring = self.ring_entries(stream)
        entries = ring if stream.kind.startswith("sliding") else self.window
        return self.batch * entries * self.entry_bytes(stream)

    def ring_spare_bytes(self, stream: Stream) -> int:
        """Bytes of what the rings of all rows hold beyond `window_bytes`, one layer."""
        ring = self.batch * self.ring_entries(stream) * self.entry_bytes(stream)
        return ring - self.window_bytes(stream)

    def block_bytes(self, stream: Stream) -> int:
        """Bytes of one block in one layer."""
        return self.window * self.entry_bytes(stream)

    @property
    def bytes_per_token(self) -> int:
        """Bytes by which a token makes the cache grow, all layers (rounded up)."""
        grown = sum(
            num * Fraction(self.entry_bytes(s), s.layout.tokens_per_entry)
            for s, num in self._counts()
            if not s.kind.startswith("sliding")
        )
        return math.ceil(grown)

    @property
    def ping_pong_bytes(self) -> int:
        """Bytes of the slots that streamed chunks pass through, shared by all layers."""
        chunks = (self.slots_per_chunk(s) * self.block_bytes(s) for s, _ in self._counts())
        return PING_PONG_SLOTS * max(chunks, default=0)

    def slots_per_chunk(self, stream: Stream) -> int:
        """Blocks of a placed stream that one streamed chunk holds; 0 where nothing is streamed."""
        if not (self.uses_link and self.is_placed(stream)):
            return 0
        entries = -(-self.batch * self.max_len // stream.layout.tokens_per_entry)
        chunk = min(self.chunk_entries, -(-entries // self.window) * self.window)
        return max(1, chunk // self.window)

    @property
    def device_bytes(self) -> int:
        """Bytes of windows, rings and PING-PONG."""
        rings = sum(
            num * (self.window_bytes(s) + self.ring_spare_bytes(s)) for s, num in self._counts()
        )
        return rings + self.ping_pong_bytes

    def pool_bytes(self, slots: int | None = None) -> int:
        """Bytes of the blocks in host memory, all layers; of at most `slots` of them."""
        most = self.batch * self.max_len if slots is None else slots
        return sum(
            num * min(most, self.batch * self.row_blocks(s)) * self.block_bytes(s)
            for s, num in self._counts()
        )

    def buffer_bytes(self, slots: int | None = None) -> int:
        """Bytes of the buffers that blocks pass through on their way home.

        Prefill has two layers of the longest prompt under way, decode one block of a few rows, all layers.

        Args:
            slots: blocks that there is room for: no prompt is longer.
        """
        most = self.max_len if slots is None else slots

        def layer_bytes(layer: tuple[Stream, ...]) -> int:
            return sum(min(most, self.row_blocks(s)) * self.block_bytes(s) for s in layer)

        prefill = LAYERS_IN_FLIGHT * max(map(layer_bytes, set(self.streams)), default=0)
        rows = 1 + moves_under_way(self.batch)  # and one whose window is full, which is waited for
        moved = sum(
            num * self.block_bytes(s) for s, num in self._counts() if min(most, self.row_blocks(s))
        )
        return max(prefill, rows * moved)

    def host_bytes(self, slots: int | None = None) -> int:
        """Bytes of host memory: pools and buffers, with at most `slots` blocks (None = all there may be)."""
        return self.pool_bytes(slots) + self.buffer_bytes(slots)

    def host_slots(self, host_memory: int | None) -> int:
        """Blocks (of one placement) that `host_memory` bytes hold with their buffers; None = all there may be."""
        needed = self.batch * max((self.row_blocks(s) for s, _ in self._counts()), default=0)
        if host_memory is None or self.host_bytes() <= host_memory:
            return needed
        return largest(lambda slots: self.host_bytes(slots) <= host_memory, 1, needed - 1)

    def require_slots(self, host_memory: int | None) -> int:
        """`host_slots`, of which there must be one if a window can ever give a block away.

        Raises:
            CapacityError: not even one block fits into `host_memory`.
        """
        slots = self.host_slots(host_memory)
        if slots == 0 and any(self.row_blocks(stream) for stream, _ in self._counts()):
            raise CapacityError(
                f"host_memory: one block of {self.window} tokens and its buffers take {self.host_bytes(1)} bytes in "
                f"all layers, the budget is {host_memory}; raise it or choose a smaller window"
            )
        return slots

    def _counts(self) -> Iterator[tuple[Stream, int]]:
        yield from _count(self.streams)


@functools.lru_cache(maxsize=16)
def _count(streams: Layers) -> tuple[tuple[Stream, int], ...]:
    return tuple(collections.Counter(stream for layer in streams for stream in layer).items())
