"""Does streaming run at the speed of the link, and what does a host part without work cost?

Steps of layers that only attend, everything PINNED: GB/s of the pump for three sizes of chunk, beside plain copies of
the same size in the same run, over memory of their own, pinned in one piece, and over the cache's own, which was pinned
as it grew: no copy goes from one piece to the next. The pump includes what the device does with each chunk.

What a host part adds to a layer (us) when there is nothing for it to do, and with one tiny block a row. The
ceiling is what its bytes take: none without a block, else query down and partial up over the link and the block at the
speed of the CPU. Last the ablation: the pump beside the kernel of streamed blocks that reads them over the link where
they lie, and does nothing else; a step of the pump also appends to the windows. On a CPU, and with --quick, what is
added is less than the spread of the steps, and may come out below 0.
"""

import statistics
from typing import Any, Final

import jax.numpy as jnp
import options
import record
from ceilings import GB, Ceilings
from filled import Setup, phases, placed_bytes
from mapped import Mapped

from tests.cases import CASES
from wscope_jax.layout import Region
from wscope_jax.policies import GpuOnly, Policy, WriteScope

CASE: Final = "gqa8_d128"
LAYERS: Final = 8
TINY: Final = 32  # entries of a tiny block

Rows = list[dict[str, Any]]


def pump(ceilings: Ceilings, chunk_entries: int, batch: int, context: int, quick: bool) -> Rows:
    """Rows of one size of chunk."""
    case = CASES[CASE]
    chunk_bytes = chunk_entries * case.layout.entry_bytes(2)
    layers, few_s = (2, 0.1) if quick else (LAYERS, 0.3)
    plain, own, rates = [], [], []
    sizes: dict[str, Any] = {"layers": layers, "batch": batch, "tokens": context + 128}
    with Setup(case, policy=GpuOnly(), chunk_entries=chunk_entries, **sizes) as setup:
        placed = placed_bytes(setup.cache)[Region.PINNED]
        pages = setup.cache._pools.pool(Region.PINNED)
        for _ in range(4):
            plain.append(ceilings.link_alone(few_s, chunk_bytes))
            rates += [placed / setup.run(2) / GB for _ in range(2 if quick else 4)]
            own.append(ceilings.link_alone(few_s, chunk_bytes, pages))
        plain.append(ceilings.link_alone(few_s, chunk_bytes))
        found, turns = phases(setup.timings), setup.cache.num_turns
    words = f"copies busy for {found['link']:.2f} ms a step" if found.get("link") else "no timings"
    print(
        f"  chunks of {chunk_entries}: {turns} turns a layer, PINNED {placed / GB:.2f} GB, {words}"
    )
    label, limit = f"{CASE}_b{batch}_{context}_c{chunk_entries}", statistics.median(plain)
    return [
        record.row(label, "dma", plain, "GB/s", limit),
        record.row(label, "dma of the cache's pages", own, "GB/s", limit),
        record.row(label, "wscope/pump", rates, "GB/s", limit),
    ]


def host_part(ceilings: Ceilings, batch: int, quick: bool) -> Rows:
    """What a host part adds to a layer: without a block, and with one of TINY entries a row."""
    case, rounds = CASES[CASE], 5 if quick else 12
    layers = 2 if quick else LAYERS

    def setup(policy: Policy, tokens: int) -> Setup:
        return Setup(
            case,
            layers=layers,
            batch=batch,
            tokens=tokens,
            policy=policy,
            window=TINY,
            chunk_entries=TINY,
        )

    step_us: dict[str, list[float]] = {}
    with (
        setup(GpuOnly(), TINY // 2) as without,
        setup(WriteScope(share=1.0), TINY // 2) as empty,
        setup(WriteScope(share=1.0), TINY // 2 + TINY) as tiny,
    ):
        assert placed_bytes(tiny.cache)[Region.PINNED] == 0
        for _ in range(rounds):
            for name, which in (("without", without), ("empty", empty), ("tiny", tiny)):
                few = [which.run(1) for _ in range(5)]
                step_us.setdefault(name, []).append(1e6 * statistics.median(few))
    print(
        f"  batch {batch}: a step without a host part {statistics.median(step_us['without']):.0f} us"
    )
    layout, rows = case.layout, []
    carried = batch * case.num_q_heads * (2 * layout.key_dim + 4 * layout.value_dim + 4)
    block = batch * TINY * layout.entry_bytes(2)
    least_us = 1e-3 * (carried / ceilings["link"] + block / ceilings["cpu"])
    for name, ceiling in (("empty", None), ("tiny", least_us)):
        pairs = zip(step_us[name], step_us["without"], strict=True)
        added = [(with_it - base) / layers for with_it, base in pairs]
        label = f"{CASE}_b{batch}_{name}"
        rows.append(record.row(label, "wscope/host part", added, "us", ceiling))
    return rows


def ablation(ceilings: Ceilings, batch: int, context: int, quick: bool) -> Rows:
    """Rows of the pump and of what reads PINNED where it lies, in turns."""
    case, plain, pumped, mapped = CASES[CASE], [], [], []
    sizes: dict[str, Any] = {"layers": 2 if quick else LAYERS, "batch": batch, "tokens": context}
    q = jnp.ones((batch, case.num_q_heads, case.layout.key_dim), jnp.bfloat16)
    with Setup(case, policy=GpuOnly(), **sizes) as setup:
        placed = placed_bytes(setup.cache)[Region.PINNED]
        in_place = Mapped(setup.cache, float(case.scale))
        in_place.run(q, 1)
        for _ in range(4):
            plain.append(ceilings.link_alone(0.1 if quick else 0.3))
            pumped += [placed / setup.run(2) / GB for _ in range(2)]
            mapped += [placed / in_place.run(q, 2) / GB for _ in range(2)]
    label, limit = f"{CASE}_b{batch}_{context}", statistics.median(plain)
    return [
        record.row(label, "dma", plain, "GB/s", limit),
        record.row(label, "wscope/pump", pumped, "GB/s", limit),
        record.row(label, "wscope/mapped", mapped, "GB/s", limit),
    ]


def main() -> None:
    args = options.parser(__doc__).parse_args()
    batch, context = (2, 8192) if args.quick else (32, 8192)
    small = 64 << 20
    ceilings = Ceilings(small if args.quick else 16 * small, small if args.quick else 64 * small)
    ceilings.sample(0.1)
    with record.kept(args.json) as rows:
        for chunk_entries in (4096, 8192, 16384):
            rows += pump(ceilings, chunk_entries, batch, context, args.quick)
        for rows_at_once in (1, 2) if args.quick else (1, 32):
            rows += host_part(ceilings, rows_at_once, args.quick)
        rows += ablation(ceilings, batch, context, args.quick)


if __name__ == "__main__":
    options.end_in_one_line(main)
