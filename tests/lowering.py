"""Programs for a GPU, traced and lowered on a machine that has none."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def target(platform: str) -> Iterator[None]:
    """Within it programs can be traced and lowered for a platform, "cpu" or "cuda"."""
    if platform == "cpu" or jax.__version_info__ < (0, 11):
        yield
        return
    # Pallas asks for the device that it lowers for; how one is described differs between versions.
    facts = {"device_kind": "NVIDIA H200", "num_cores": None, "platform": "gpu"}
    fields = [field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)]
    device = jax.sharding.AbstractDevice(**{name: facts[name] for name in fields})
    # Auto: whatever is traced, nobody asks how it is spread over the one device.
    axis = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(axis,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
