"""What a policy, which may be anybody's, is asked: each answer is checked before it is acted on."""

import functools
from typing import Any, cast

from wscope_jax.arguments import having, number, shown
from wscope_jax.errors import UsageError
from wscope_jax.layout import Region
from wscope_jax.placement import HOST_REGIONS, Occupancy
from wscope_jax.policies.protocol import Policy
from wscope_jax.roofline import StepTiming


def require(policy: Any) -> Policy:
    """`policy`, if it is one.

    Raises:
        UsageError: it is a class, a name, or an object that lacks something of `Policy`.
    """
    having("policy", policy, _members(Policy), "an object such as policies.CpuOnly()")
    having("policy.schedule", policy.schedule, ("jobs", "__call__"), "a schedule")
    return cast(Policy, policy)


def route(policy: Policy, occupancy: Occupancy) -> Region | None:
    """What the policy answers to `Policy.route`, if it keeps to what that may answer.

    Raises:
        UsageError: it names no host region, or one that has no room.
    """
    region = policy.route(occupancy)
    room = [r for r in HOST_REGIONS if occupancy.has_room(r)]
    if region is not None and not any(region is r for r in room):
        allowed = ", ".join([*(f"Region.{r.name}" for r in room), "None"])
        raise UsageError(
            f"policy: {policy.name} routes a block to {shown(region)}; what it may answer here is {allowed}"
        )
    return region


def cpu_share(policy: Policy, num_placed: int) -> float:
    """What the policy answers to `Policy.cpu_share`, if that is a share.

    Raises:
        UsageError: it is none.
    """
    return number("policy.cpu_share", policy.cpu_share(num_placed), 0.0, 1.0)


def observe(policy: Policy, timing: StepTiming) -> Policy:
    """The policy after a step was timed.

    Raises:
        UsageError: it answered with something else.
    """
    after = policy.observe(timing)
    return after if after is policy else require(after)


@functools.cache
def _members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]
