"""How the GPU kernels cut the attention of one layer into programs, and what they pad."""

import dataclasses
from typing import Final

from jax.experimental.pallas import triton as pltriton

from wscope_jax.layout import EntryLayout

LEAST: Final = 16  # rows and columns of the smallest product of the tensor cores
STEP_ENTRIES: Final = 64  # taken at a time, at most
# Bytes of a step at most: three of them are in the shared memory of a multiprocessor.
STEP_BYTES: Final = 64 << 10
SUMS: Final = 16_384  # float32 sums of a program: more do not fit into its registers


def padded(size: int) -> int:
    """The power of two that a kernel takes for `size`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def key_parts(layout: EntryLayout) -> tuple[tuple[int, int], ...]:
    """Offset and dims of the parts of a key that are loaded and multiplied each on its own.

    A value inside the key is a part, so that it is loaded once. A latent key of 512 + 64 dims is not padded to 1024.
    """
    if not layout.value_in_key:
        return ((0, layout.key_dim),)
    rest = layout.key_dim - layout.value_dim
    return ((0, layout.value_dim), (layout.value_dim, rest))[: 2 if rest else 1]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work of one layer is cut into programs.

    Attributes:
        group: query heads that read a kv head.
        rows: of them in one program, padded.
        tiles: programs that share a kv head's query heads.
        step: entries taken at a time.
    """

    group: int
    rows: int
    tiles: int
    step: int

    @classmethod
    def of(cls, layout: EntryLayout, num_heads: int, entries: int, itemsize: int) -> "Tiling":
        """For `num_heads` query heads over at least `entries` entries of numbers of `itemsize` bytes."""
        group = num_heads // layout.num_kv_heads
        rows = min(padded(group), max(LEAST, SUMS // padded(layout.value_dim)))
        dims = sum(padded(dim) for _, dim in key_parts(layout))
        dims += 0 if layout.value_in_key else padded(layout.value_dim)
        step = min(STEP_ENTRIES, padded(entries))
        while step > LEAST and step * dims * itemsize > STEP_BYTES:
            step //= 2
        return cls(group, rows, -(-group // rows), step)

    def params(self, value_dim: int) -> pltriton.CompilerParams:
        """Warps enough for 64 sums a thread."""
        warps = 4 if self.rows * padded(value_dim) <= SUMS // 2 else 8
        return pltriton.CompilerParams(num_warps=warps, num_stages=3)
