"""Policies by name; all are values of one shape (`protocol.Policy`)."""

from collections.abc import Callable
from typing import Final

from wscope_jax.arguments import number, shown
from wscope_jax.errors import UsageError
from wscope_jax.policies.answers import require as require
from wscope_jax.policies.fixed import CpuOnly as CpuOnly
from wscope_jax.policies.fixed import GpuOnly as GpuOnly
from wscope_jax.policies.fixed import Resident as Resident
from wscope_jax.policies.protocol import Policy as Policy
from wscope_jax.policies.write_scope import WriteScope as WriteScope

BY_NAME: Final[dict[str, Callable[[], Policy]]] = {
    "write_scope": WriteScope,
    "gpu_only": GpuOnly,
    "cpu_only": CpuOnly,
    "resident": Resident,
}


def choose(name: str, cpu_share: float | None = None) -> Policy:
    """The policy called `name`, with a fixed CPU share if one is given.

    Args:
        name: a key of `BY_NAME`, or "auto": `write_scope`, which is also what a numeric share asks for.
        cpu_share: r in [0, 1], or None for the policy's own.

    Raises:
        UsageError: unknown name, a share out of range, or a share for a policy that has its own.
    """
    if not isinstance(name, str) or (name != "auto" and name not in BY_NAME):
        known = ", ".join(BY_NAME)
        raise UsageError(f"policy: {shown(name)} is unknown; choose one of auto, {known}")
    if cpu_share is None:
        return BY_NAME["write_scope" if name == "auto" else name]()
    if name not in ("auto", "write_scope"):
        raise UsageError(
            f"cpu_share: policy {name} has its own share, got {cpu_share}; use policy write_scope or share 'auto'"
        )
    return WriteScope(share=number("cpu_share", cpu_share, 0.0, 1.0))
