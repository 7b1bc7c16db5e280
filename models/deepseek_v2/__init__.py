"""DeepSeek-V2 and V2-Lite (model_type deepseek_v2)."""

from wscope_jax.models.deepseek_v2.config import DeepseekV2Config as DeepseekV2Config
from wscope_jax.models.deepseek_v2.config import read_config as read_config
from wscope_jax.models.deepseek_v2.model import DeepseekV2 as DeepseekV2
from wscope_jax.models.deepseek_v2.weights import weight_table as weight_table
