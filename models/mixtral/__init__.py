"""Mixtral (model_type mixtral)."""

from wscope_jax.models.mixtral.config import MixtralConfig as MixtralConfig
from wscope_jax.models.mixtral.config import read_config as read_config
from wscope_jax.models.mixtral.model import Mixtral as Mixtral
from wscope_jax.models.mixtral.weights import weight_table as weight_table
