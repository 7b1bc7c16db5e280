"""What fits: the bytes of every region of a cache, before anything is allocated."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from wscope_jax import machine
from wscope_jax.arguments import integer
from wscope_jax.errors import CapacityError
from wscope_jax.footprint import CHUNK_ENTRIES, MOST, Footprint
from wscope_jax.layout import Region, Stream, check_layers, check_window
from wscope_jax.policies import Policy, answers, require
from wscope_jax.search import largest
from wscope_jax.sizes import amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """One stream of one layer.

    Attributes:
        stream: what is stored.
        bytes: by name: "unpinned", "pinned", "window", and "spare" (what its ring holds beyond the window's D).
    """

    stream: Stream
    bytes: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of a cache for a batch of sequences of one length, and whether the memory holds them.

    Attributes:
        footprint: sizes of the cache.
        policy: places the blocks; its share splits the host regions.
        weights: bytes of the model's parameters.
        host_memory: budget for host regions and their buffers, or None if there is none.
        gpu_memory: budget for all that lies on the device, or None if there is none.
        machine_memory: budget for all of it together, on a machine without a GPU, or None.
        position_limit: tokens that the model was made for, or None.
    """

    footprint: Footprint
    policy: Policy
    weights: int = 0
    host_memory: int | None = None
    gpu_memory: int | None = None
    machine_memory: int | None = None
    position_limit: int | None = None

    # --- bytes --------------------------------------------------------------------------------

    @functools.cached_property
    def layers(self) -> tuple[tuple[StreamPlan, ...], ...]:
        """Per layer its streams."""
        made = {layer: tuple(map(self._stream, layer)) for layer in set(self.footprint.streams)}
        return tuple(made[layer] for layer in self.footprint.streams)

    def _stream(self, stream: Stream) -> StreamPlan:
        size = self.footprint
        blocks = size.batch * size.row_blocks(stream)
        # What a run of the policy's own routing ends with: it gives the CPU the next block while
        # the CPU has less than its share.
        share = answers.cpu_share(self.policy, blocks * size.window) if blocks else 0.0
        unpinned = min(blocks, math.ceil(share * blocks))
        sizes = {
            Region.UNPINNED.value: unpinned * size.block_bytes(stream),
            Region.PINNED.value: (blocks - unpinned) * size.block_bytes(stream),
            Region.WINDOW.value: size.window_bytes(stream),
            "spare": size.ring_spare_bytes(stream),
        }
        return StreamPlan(stream=stream, bytes=sizes)

    @functools.cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes by region name, of "spare" (rings beyond D, buffers that blocks pass through) and of "weights"."""
        streams = [stream for layer in self.layers for stream in layer]
        totals = {
            name: sum(stream.bytes[name] for stream in streams)
            for name in (Region.UNPINNED.value, Region.PINNED.value, Region.WINDOW.value)
        }
        buffers = self.footprint.buffer_bytes() + self.staging
        return {
            **totals,
            Region.PING_PONG.value: self.footprint.ping_pong_bytes,
            "spare": sum(stream.bytes["spare"] for stream in streams) + buffers,
            "weights": self.weights,
        }

    @property
    def bytes_per_token(self) -> int:
        """Bytes by which a token makes the cache grow, all layers (rounded up)."""
        return self.footprint.bytes_per_token

    @property
    def staging(self) -> int:
        """Bytes of device memory that blocks wait in for the link; without a GPU it is the buffer in host memory."""
        return 0 if self.gpu_memory is None else self.footprint.buffer_bytes()

    @property
    def host_needed(self) -> int:
        """Bytes that count against `host_memory`."""
        return self.footprint.host_bytes()

    @property
    def device_needed(self) -> int:
        """Bytes that count against `gpu_memory`, a margin for programs and activations included."""
        taken = self.weights + self.footprint.device_bytes + self.staging
        return taken if self.gpu_memory is None else machine.with_margin(taken)

    @property
    def margin(self) -> int:
        """Bytes of the GPU budget that are left to programs and activations."""
        return 0 if self.gpu_memory is None else machine.margin_of(self.gpu_memory)

    # --- verdict ------------------------------------------------------------------------------

    @property
    def shortages(self) -> dict[str, int]:
        """Bytes that are missing, by memory ("host", "gpu", "machine"); only what is short."""
        budgets = {"host": self.host_memory, "gpu": self.gpu_memory, "machine": self.machine_memory}
        needs = self._needs()
        return {
            name: needs[name] - budget
            for name, budget in budgets.items()
            if budget is not None and needs[name] > budget
        }

    def _needs(self) -> dict[str, int]:
        host, device = self.host_needed, self.device_needed
        return {"host": host, "gpu": device, "machine": host + device}

    @property
    def fits(self) -> bool:
        """Whether every budget holds what it has to."""
        return not self.shortages

    @property
    def short_by(self) -> int:
        """Bytes that are missing, over all budgets; 0 if it fits."""
        return sum(self.shortages.values())

    @functools.cached_property
    def largest_context(self) -> int | None:
        """Tokens of each row that still fit at this batch; 0 if none does, None if memory sets no limit."""
        most = largest(lambda size: self._with(max_len=size).fits, 1, MOST)
        return None if most == MOST else most

    @functools.cached_property
    def largest_batch(self) -> int | None:
        """Rows of this length that still fit; 0 if none does, None if memory sets no limit."""

        def fits(batch: int) -> bool:
            return self._with(batch=batch).fits

        # With more rows the windows keep fewer blocks of each: among those that keep as many, fewer rows need less.
        one, spare = self._with(batch=1).footprint, self.footprint.spare_memory
        for kept in range(one.spare_blocks + 1):
            first = 1
            if kept < one.spare_blocks:
                first += spare // ((kept + 1) * one.spare_block_bytes)
            last = min(MOST, spare // (kept * one.spare_block_bytes)) if kept else MOST
            if first <= last and fits(first):
                most = largest(fits, first, last)
                return None if most == MOST else most
        return 0

    @functools.cached_property
    def largest_spare(self) -> int:
        """Blocks that the windows could keep beyond D, as far as the device goes."""
        step = self.footprint.spare_block_bytes
        whole = self._with(spare_memory=MOST * step).footprint.spare_blocks

        def fits(blocks: int) -> bool:
            return not {"gpu", "machine"} & set(self._with(spare_memory=blocks * step).shortages)

        return largest(fits, 1, whole)

    def _with(self, **changes: Any) -> "Plan":
        """The same for another size."""
        return dataclasses.replace(self, footprint=dataclasses.replace(self.footprint, **changes))

    @property
    def why(self) -> str | None:
        """One line: what is short of what; None if it fits."""
        if self.fits:
            return None
        device, needs = self._device_text(), self._needs()
        takers = {
            "host": "host memory: the placed blocks and their buffers",
            "gpu": f"GPU memory: {device}, with a margin,",
            "machine": f"this machine's memory: the placed blocks, their buffers, {device}",
        }
        return "; ".join(
            f"{takers[name]} take {amount(needs[name])}, the budget is {amount(needs[name] - missing)}: "
            f"short by {amount(missing)}"
            for name, missing in self.shortages.items()
        )

    def _device_text(self) -> str:
        return "weights, " * (self.weights > 0) + "window, PING-PONG and spare"

    def require_fit(
        self,
        *,
        shorter: str = "lower max_model_len to {}",
        fewer: str = "take {} of the sequences",
        roomier: str = "lower spare_memory to {}",
        larger: Mapping[str, str] | None = None,
    ) -> None:
        """Raises CapacityError with what is missing, and what to do, if the plan does not fit.

        Args:
            shorter: what the caller's user can do about the length; "{}" is the largest that fits.
            fewer: likewise about the batch.
            roomier: likewise about what windows keep beyond D.
            larger: about each memory that may be short; None = what suits a user of the library.
        """
        if self.fits:
            return
        larger = larger or {
            "host": "raise host_memory",
            "gpu": "raise gpu_memory",
            "machine": "free memory on this machine",
        }
        choices = [" and ".join(larger[name] for name in self.shortages)]
        if self.largest_spare < self.footprint.spare_blocks:
            megabytes = -(-self.largest_spare * self.footprint.spare_block_bytes // 10**6)
            choices.append(roomier.format(f"{megabytes}MB"))
        if self.largest_context:
            choices.append(shorter.format(self.largest_context))
        if self.largest_batch:
            choices.append(fewer.format(self.largest_batch))
        nothing = "" if len(choices) > 1 else "no length and no batch fits, "
        raise CapacityError(f"{self.why}; {nothing}{' or '.join(choices)}")


def plan(
    streams: Sequence[Sequence[Stream]],
    *,
    policy: Policy,
    batch: int,
    max_len: int,
    window: int = 256,
    itemsize: int = 2,
    host_memory: int | None = None,
    gpu_memory: int | None = None,
    machine_memory: int | None = None,
    weights: int = 0,
    position_limit: int | None = None,
    chunk_entries: int = CHUNK_ENTRIES,
    spare_memory: int = 0,
) -> Plan:
    """Bytes by region when every row has `max_len` tokens.

    Args:
        streams: per layer what it stores.
        policy: places the blocks; its share splits the host regions.
        batch: rows.
        max_len: tokens of each row.
        window: D.
        itemsize: bytes of a stored number.
        host_memory: budget for both host regions and their buffers, in bytes; None = no limit.
        gpu_memory: budget for weights, window, PING-PONG, spare and margin, in bytes; None = no GPU.
        machine_memory: budget for all of it on a machine without a GPU, in bytes; None = no limit.
        weights: bytes of the parameters.
        position_limit: tokens that the model was made for.
        chunk_entries: entries of one layer in a streamed chunk.
        spare_memory: bytes that windows may take beyond D, see `Footprint`.

    Raises:
        UsageError: an impossible argument.
    """
    check_layers(streams)
    policy = require(policy)
    check_window(window)
    for name, count in (("batch", batch), ("max_model_len", max_len)):
        integer(name, count, 1, MOST)
    integer("weights", weights, 0)
    limits = {
        "host_memory": host_memory,
        "gpu_memory": gpu_memory,
        "machine_memory": machine_memory,
        "position_limit": position_limit,
    }
    for name, limit in limits.items():
        if limit is not None:
            integer(name, limit, 0)
    return Plan(
        footprint=Footprint(
            streams=tuple(map(tuple, streams)),
            batch=batch,
            max_len=max_len,
            window=window,
            itemsize=itemsize,
            uses_host=policy.uses_host,
            uses_link=policy.uses_link,
            chunk_entries=chunk_entries,
            spare_memory=spare_memory,
        ),
        policy=policy,
        weights=weights,
        host_memory=host_memory,
        gpu_memory=gpu_memory,
        machine_memory=machine_memory,
        position_limit=position_limit,
    )
