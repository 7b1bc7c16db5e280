"""The model families: ordinary Flax NNX modules, found by the `model_type` of a checkpoint's config.json.

A family is a folder with `config.py` (what its config.json may say), `weights.py` (its tensor names) and `model.py`.
"""

if __name__ != "wscope_jax.models":  # a second import path would load every class twice
    raise ImportError("import wscope_jax.models, not models")

from wscope_jax.models.registry import BY_TYPE as BY_TYPE
from wscope_jax.models.registry import Family as Family
from wscope_jax.models.registry import abstract as abstract
from wscope_jax.models.registry import load as load
from wscope_jax.models.registry import places as places
from wscope_jax.models.registry import random as random
from wscope_jax.models.registry import read_config as read_config
from wscope_jax.models.registry import read_file as read_file
