"""What the readers of host memory give in this run, each alone and both at once: ceilings for several benchmarks."""

import statistics
from typing import Final

from wscope_jax import _ffi, devices
from wscope_jax.dispatcher import start_workers

SLOT: Final = 1 << 20
CHUNK: Final = 32 << 20  # bytes of a copy
GB: Final = 1e9
QUICK_BYTES: Final = 128 << 20
LEAST_BYTES: Final = 2 << 30  # to read: of fewer, a last-level cache of 300 MB keeps a part
NAMES: Final = ("cpu", "link", "cpu_of_both", "link_of_both")


class Ceilings:
    """Pools of their own, each committed (and pinned) in one piece, and what reading them gave so far, in GB/s.

    Args:
        read_bytes: that the workers read over and over; more than the processor's caches hold.
        link_bytes: that the link copies over and over.
    """

    def __init__(self, read_bytes: int, link_bytes: int) -> None:
        self._device = devices.cuda_number()
        if _ffi.num_workers() == 0:
            start_workers(devices.num_workers(None))
        self._isa = _ffi.isas()[-1]
        self._read = self._pool(read_bytes, None)
        self._link = self._pool(link_bytes, self._device)
        self.samples: dict[str, list[float]] = {}
        self.clear()

    @classmethod
    def make(cls, quick: bool, num_bytes: int = LEAST_BYTES) -> "Ceilings":
        """Memory for either reader, as many bytes as what they are the ceilings of, or few to be quick."""
        size = QUICK_BYTES if quick else max(LEAST_BYTES, num_bytes)
        return cls(size, size)

    @staticmethod
    def _pool(num_bytes: int, device: int | None) -> _ffi.Pool:
        slots = max(1, num_bytes // SLOT)
        pool = _ffi.Pool(1, slots, SLOT, device)
        pool.commit(slots)
        return pool

    def close(self) -> None:
        """Gives the memory back; what was sampled stays."""
        self._read.close()
        self._link.close()

    def clear(self) -> None:
        """Forgets what was sampled."""
        self.samples = {name: [] for name in NAMES}

    def cpu_alone(self, seconds: float, pool: _ffi.Pool | None = None) -> float:
        """GB/s of the workers reading `pool`, or the memory made for that."""
        pool = pool or self._read
        return _ffi.measure_streams(pool, None, SLOT, seconds, self._isa)[0] / GB

    def link_alone(
        self,
        seconds: float,
        chunk_bytes: int = CHUNK,
        pool: _ffi.Pool | None = None,
        rate: float | None = None,
    ) -> float:
        """GB/s of copies of that size out of `pool`, or the memory made for that.

        They are made back to back, or one at a time and no faster than `rate` bytes a second.
        """
        pool = pool or self._link
        rates = _ffi.measure_streams(
            None, pool, chunk_bytes, seconds, self._isa, self._device, rate
        )
        return rates[1] / GB

    def at_once(
        self, seconds: float, read: _ffi.Pool | None = None, link: _ffi.Pool | None = None
    ) -> tuple[float, float]:
        """GB/s of the workers and of the link at the same time, out of these or the memory made for that."""
        rates = _ffi.measure_streams(
            read or self._read, link or self._link, CHUNK, seconds, self._isa, self._device
        )
        return rates[0] / GB, rates[1] / GB

    def sample(self, seconds: float, times: int = 1) -> None:
        """Samples CPU and link, each alone and both at once, for `seconds` each; so many times."""
        for _ in range(times):
            alone = (self.cpu_alone(seconds), self.link_alone(seconds))
            for name, value in zip(NAMES, (*alone, *self.at_once(seconds)), strict=True):
                self.samples[name].append(value)

    def both(self) -> list[float]:
        """Sums of the two rates while both were at work."""
        pairs = zip(self.samples["cpu_of_both"], self.samples["link_of_both"], strict=True)
        return [cpu + link for cpu, link in pairs]

    def tell(self) -> None:
        """Prints the medians."""
        both = statistics.median(self.both())
        alone = f"CPU {self['cpu']:.1f} GB/s, link {self['link']:.1f} GB/s"
        print(f"  reading alone: {alone}; both at once {both:.1f} GB/s", flush=True)

    def __getitem__(self, name: str) -> float:
        return statistics.median(self.samples[name])
