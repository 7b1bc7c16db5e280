"""Qwen3-MoE (model_type qwen3_moe)."""

from wscope_jax.models.qwen3_moe.config import Qwen3MoeConfig as Qwen3MoeConfig
from wscope_jax.models.qwen3_moe.config import read_config as read_config
from wscope_jax.models.qwen3_moe.model import Qwen3Moe as Qwen3Moe
from wscope_jax.models.qwen3_moe.weights import weight_table as weight_table
