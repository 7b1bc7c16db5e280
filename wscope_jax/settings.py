"""What an engine is given, checked before anything is made for it."""

from collections.abc import Sequence, Set
from typing import Any, Final

from wscope_jax import policies
from wscope_jax.arguments import having, instance, integer, shown
from wscope_jax.errors import UsageError
from wscope_jax.layout import check_window
from wscope_jax.policies import Policy
from wscope_jax.tokenizer import Tokenizer

# What an engine and its schedules call.
MODEL: Final = ("config", "vocab_size", "layers", "streams", "embed", "project", "finish", "logits")


def check(policy: Any, window: Any, threads: Any, progress: Any) -> Policy:
    """The policy that was named or given, if it and the other settings are possible.

    Raises:
        UsageError: one is not.
    """
    check_window(window)
    if threads is not None:
        integer("threads", threads, 1)
    having("progress", progress, ("loading", "prefilling"), "a Progress, such as progress.SILENT")
    return policies.choose(policy) if isinstance(policy, str) else policies.require(policy)


def check_memory(gpu_memory: Any, host_memory: Any, spare_memory: Any) -> None:
    """Checks budgets in bytes; the first two may be None.

    Raises:
        UsageError: one is impossible.
    """
    for name, budget in (("gpu_memory", gpu_memory), ("host_memory", host_memory)):
        if budget is not None:
            integer(name, budget, 1)
    integer("spare_memory", spare_memory, 0)


def check_model(model: Any, tokenizer: Any) -> None:
    """Checks that these are a model and its tokenizer, or None for none.

    Raises:
        UsageError: they are not.
    """
    having("model", model, MODEL, "a model, such as models.load(directory)")
    if tokenizer is not None:
        instance("tokenizer", tokenizer, Tokenizer, "a Tokenizer or None")


def end_ids(given: Any) -> frozenset[int]:
    """Ids that end a sequence.

    Raises:
        UsageError: it is no set of them.
    """
    if not isinstance(given, Set | Sequence) or isinstance(given, str | bytes):
        raise UsageError(f"eos_ids: expected a set of token ids, got {shown(given)}")
    return frozenset(integer("eos_ids", token, 0) for token in given)
