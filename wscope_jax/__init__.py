"""Long-context inference of Mixture-of-Experts models on one GPU, with a KV cache that is placed when it is written.

Letters in shapes: B batch, T query tokens, N tokens of either kind, S stored entries, L layers, M model width,
H query heads, G kv heads, K key dim, V value dim, D entries in a block, C slots in a chunk, E experts (or numbers of a
block and head in `ops`), F expert width, X experts per token.

Importing this package starts no backend and no thread; its names are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wscope_jax import models as models
    from wscope_jax import ops as ops
    from wscope_jax import policies as policies
    from wscope_jax.attention import attend as attend
    from wscope_jax.attention import attend_prompt as attend_prompt
    from wscope_jax.cache import InplaceKVCache as InplaceKVCache
    from wscope_jax.compiled import COMPILER_OPTIONS as COMPILER_OPTIONS
    from wscope_jax.engine import Engine as Engine
    from wscope_jax.layout import Entries as Entries
    from wscope_jax.layout import EntryLayout as EntryLayout
    from wscope_jax.layout import Stream as Stream
    from wscope_jax.memory_plan import plan as plan
    from wscope_jax.partial import Partial as Partial
    from wscope_jax.partial import merge as merge
    from wscope_jax.roofline import Roofline as Roofline
    from wscope_jax.rows import Event as Event
    from wscope_jax.rows import Result as Result
    from wscope_jax.sampling import Sampling as Sampling

__version__ = "0.1.0"

_HOME = {
    "COMPILER_OPTIONS": "compiled",
    "Engine": "engine",
    "Entries": "layout",
    "EntryLayout": "layout",
    "Event": "rows",
    "InplaceKVCache": "cache",
    "Partial": "partial",
    "Result": "rows",
    "Roofline": "roofline",
    "Sampling": "sampling",
    "Stream": "layout",
    "attend": "attention",
    "attend_prompt": "attention",
    "merge": "partial",
    "plan": "memory_plan",
}
_MODULES = ("models", "ops", "policies")

__all__ = [
    "COMPILER_OPTIONS",
    "Engine",
    "Entries",
    "EntryLayout",
    "Event",
    "InplaceKVCache",
    "Partial",
    "Result",
    "Roofline",
    "Sampling",
    "Stream",
    "__version__",
    "attend",
    "attend_prompt",
    "merge",
    "models",
    "ops",
    "plan",
    "policies",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"wscope_jax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'wscope_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"wscope_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value
