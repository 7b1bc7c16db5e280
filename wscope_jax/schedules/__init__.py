"""Ways of chaining a model's functions with the two halves of `attend`."""

from wscope_jax.schedules.in_order import IN_ORDER as IN_ORDER
from wscope_jax.schedules.in_order import InOrder as InOrder
from wscope_jax.schedules.protocol import Job as Job
from wscope_jax.schedules.protocol import Model as Model
from wscope_jax.schedules.protocol import Projection as Projection
from wscope_jax.schedules.protocol import Schedule as Schedule
