"""Lowering of programs for a GPU, on a machine that has none."""

import contextlib
import dataclasses
from typing import Any

import jax


def lowered(traced: Any, platform: str) -> Any:
    """The program as it is lowered for a platform, "cpu" or "cuda"."""
    here: Any = contextlib.nullcontext()
    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        # Pallas asks for the device that it lowers for; how one is described differs between versions.
        facts = {"device_kind": "NVIDIA H200", "num_cores": None, "platform": "gpu"}
        fields = [field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)]
        device = jax.sharding.AbstractDevice(**{name: facts[name] for name in fields})
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        here = jax.sharding.use_abstract_mesh(mesh)
    with here:
        return traced.lower(lowering_platforms=(platform,))
