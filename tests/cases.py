"""Named attention shapes, shared by tests and benchmarks, and how close a kernel must come to the oracle."""

from typing import Final, NamedTuple

from wscope_jax.layout import EntryLayout


class Case(NamedTuple):
    """One layer's attention shape."""

    num_q_heads: int
    layout: EntryLayout

    @property
    def scale(self) -> float:
        return self.layout.key_dim**-0.5


CASES: Final = {
    # 8 and 4 query heads a kv head: Qwen3-30B-A3B and Mixtral-8x7B.
    "gqa8_d128": Case(32, EntryLayout(num_kv_heads=4, key_dim=128, value_dim=128)),
    "gqa4_d128": Case(32, EntryLayout(num_kv_heads=8, key_dim=128, value_dim=128)),
    "mla16_576": Case(
        16, EntryLayout(num_kv_heads=1, key_dim=576, value_dim=512, value_in_key=True)
    ),
    "v4_64_512": Case(
        64, EntryLayout(num_kv_heads=1, key_dim=512, value_dim=512, value_in_key=True)
    ),
    # Shapes that nobody releases and every kernel must get right.
    "mha_d20": Case(3, EntryLayout(num_kv_heads=3, key_dim=20, value_dim=12)),
    "gqa3_d24": Case(6, EntryLayout(num_kv_heads=2, key_dim=24, value_dim=24)),
    "mla5_40": Case(5, EntryLayout(num_kv_heads=1, key_dim=40, value_dim=33, value_in_key=True)),
}
SMALL: Final = ("mha_d20", "gqa3_d24", "mla5_40")
BIG: Final = tuple(name for name in CASES if name not in SMALL)


class Tolerance(NamedTuple):
    """Largest absolute difference to the oracle over the same stored numbers, in float32."""

    o: float
    lse: float


# Products of bfloat16 numbers are exact in float32, so what is left in both is the order of the sums. What a type loses
# when it stores a number is no part of it: the oracle gets the stored numbers.
TOLERANCES: Final = {"float32": Tolerance(1e-5, 1e-5), "bfloat16": Tolerance(1e-5, 1e-5)}
