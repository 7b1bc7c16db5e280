"""Policies by name; all are values of one shape (`protocol.Policy`)."""

from collections.abc import Callable
from typing import Any, Final, cast

from wscope_jax.arguments import number
from wscope_jax.errors import UsageError
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
    if name != "auto" and name not in BY_NAME:
        raise UsageError(f"policy: {name!r} is unknown; choose one of auto, {', '.join(BY_NAME)}")
    if cpu_share is None:
        return BY_NAME["write_scope" if name == "auto" else name]()
    if name not in ("auto", "write_scope"):
        raise UsageError(
            f"cpu_share: policy {name} has its own share, got {cpu_share}; use policy write_scope or share 'auto'"
        )
    return WriteScope(share=number("cpu_share", cpu_share, 0.0, 1.0))


def require(policy: Any) -> Policy:
    """`policy`, if it is one.

    Raises:
        UsageError: it is a class, a name, or an object that lacks something of `Policy`.
    """
    expected = "policy: expected an object such as policies.CpuOnly()"
    if isinstance(policy, type):
        raise UsageError(f"{expected}, got the class {policy.__name__}")
    if isinstance(policy, str | None):
        raise UsageError(f"{expected}, got {policy!r:.60}")
    members = (name for name in vars(Policy) if not name.startswith("_"))
    missing = [name for name in members if not hasattr(policy, name)]
    if missing:
        raise UsageError(f"{expected}, got {policy!r:.60}, which lacks {', '.join(missing)}")
    return cast(Policy, policy)
