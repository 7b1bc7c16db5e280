"""The caches of an engine's calls: with which policy, whether they fit, and what one call measures for the next."""

import dataclasses
import logging
import threading
from typing import Any

import jax.numpy as jnp

from wscope_jax import calibration, devices, machine
from wscope_jax.cache import InplaceKVCache
from wscope_jax.compiled import CompiledPrograms
from wscope_jax.footprint import CHUNK_ENTRIES
from wscope_jax.memory_plan import Plan, plan
from wscope_jax.policies import Policy, Resident, WriteScope
from wscope_jax.sizes import amount

log = logging.getLogger(__name__)


class Caches:
    """Makes a cache for each call; calls may come from several threads.

    Args:
        model: see `models`.
        policy: of the first call. If it takes its share from the machine, that is measured now, with the workers.
        is_auto: a call whose whole cache fits on the GPU gets `resident` instead of the policy.
        window: D.
        gpu_memory: bytes that a cache may take on the GPU; None = what JAX has there.
        host_memory: bytes for the host regions; None = as many as a call needs.
        spare_memory: bytes that the windows of a call may take on the device beyond D.

    Attributes:
        policy: what the next call begins with.
        dtype: storage of entries: that of the model's activations.
        host_memory: see above.
        chunk_entries: entries of one layer in a streamed chunk.
        compiled: programs, which all caches share.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        *,
        is_auto: bool,
        window: int,
        gpu_memory: int | None,
        host_memory: int | None,
        spare_memory: int,
    ) -> None:
        self._streams = model.streams
        self._window = window
        self._gpu_memory = gpu_memory
        self.host_memory = host_memory
        self._spare_memory = spare_memory
        self.dtype = str(model.embed(jnp.zeros(1, jnp.int32)).dtype)
        self.chunk_entries = CHUNK_ENTRIES
        self.compiled = CompiledPrograms()
        if isinstance(policy, WriteScope) and policy.share is None and policy.roofline is None:
            measured = calibration.measure(
                model.streams[0][0].layout,
                num_q_heads=model.config.num_q_heads,
                window=window,
                dtype=self.dtype,
            )
            policy = dataclasses.replace(policy, roofline=measured)
        self.policy = policy
        self._auto = policy if is_auto else None
        self._learning = threading.Lock()

    def plan(self, policy: Policy, batch: int, max_len: int) -> Plan:
        """What a cache takes, and whether the memory that is left now holds it."""
        gpu = devices.memory_left()  # the weights are there already
        if gpu is not None and self._gpu_memory is not None:
            gpu = min(gpu, self._gpu_memory)
        return plan(
            self._streams,
            policy=policy,
            batch=batch,
            max_len=max_len,
            window=self._window,
            itemsize=jnp.dtype(self.dtype).itemsize,
            **machine.budgets(self.host_memory, gpu)._asdict(),
            chunk_entries=self.chunk_entries,
            spare_memory=self._spare_memory,
        )

    def choose(self, batch: int, max_len: int) -> Policy:
        """The policy of the next call; with `is_auto`, on a GPU that holds the whole cache, `resident`."""
        with self._learning:
            policy, is_auto = self.policy, self.policy is self._auto
        if not is_auto or devices.current().platform == "cpu":
            return policy
        if not self.plan(Resident(), batch, max_len).fits:
            return policy
        log.info("policy: the GPU holds all %d tokens of each of %d rows: resident", max_len, batch)
        return Resident()

    def make(self, batch: int, max_len: int, policy: Policy | None = None) -> InplaceKVCache:
        """A cache that holds nothing.

        Args:
            batch: rows.
            max_len: tokens that a row may hold.
            policy: None = see `choose`.

        Raises:
            UsageError: an impossible argument.
            CapacityError: it does not fit.
        """
        policy = self.choose(batch, max_len) if policy is None else policy
        planned = self.plan(policy, batch, max_len)
        planned.require_fit()
        block = planned.footprint.spare_block_bytes
        if 0 < self._spare_memory < block:
            log.warning(
                "spare_memory: %s are less than a block of each of %d rows, %s; windows keep no more than usual",
                amount(self._spare_memory),
                batch,
                amount(block),
            )
        return InplaceKVCache(
            self._streams,
            policy=policy,
            batch=batch,
            max_len=max_len,
            window=self._window,
            dtype=self.dtype,
            host_memory=self.host_memory,
            chunk_entries=self.chunk_entries,
            spare_memory=self._spare_memory,
            compiled=self.compiled.for_call(),
        )

    def learn(self, used: Policy, learned: Policy) -> None:
        """Lets the next call begin with what one has measured that used the policy as it is now."""
        with self._learning:
            if used is self.policy:
                self._auto = learned if used is self._auto else self._auto
                self.policy = learned
