"""Configuration of DeepSeek-V2 and V2-Lite.

Where DeepSeek's own code and that of transformers give a key different meanings, the values on which they differ are
refused.
"""

import dataclasses
from typing import Any, Final, NamedTuple

from wscope_jax.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MoeConfig,
    read_model,
    read_width,
)
from wscope_jax.models.fields import Fields
from wscope_jax.models.rope import Rope, growth, read_rope, scaling_fields

DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOPK_METHODS: Final = ("greedy", "group_limited_greedy")
MAX_HEADS: Final = 4096  # each is a piece of a stored tensor
MOST_SCALING: Final = 1e6  # of the experts' weights; 16 is the largest that was published


class PromptFlops(NamedTuple):
    """Operations of the attention of a prompt in one layer, projections to and from M aside.

    Attributes:
        absorbed: with queries in latent space, over the entries as they are stored.
        expanded: with the keys and values of every head, made of the entries.
    """

    absorbed: int
    expanded: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(MoeConfig):
    """DeepSeek-V2: latent attention, dense layers first, shared experts beside the routed ones.

    Attributes:
        q_lora_rank: width of the latent of the queries, or None where they are projected at once.
        kv_lora_rank: R, width of the latent that stands for keys and values.
        qk_nope_head_dim: numbers of a key that are made of the latent, per head.
        qk_rope_head_dim: numbers of a key that are rotated, the same for all heads; `rope.dim`.
        v_head_dim: numbers of a value, per head.
        softmax_scale: multiplies the scores.
        attention_bias: the first projections of queries and entries, and the last one, have a bias.
        num_dense_layers: layers without experts, at the beginning.
        dense_size: width of their feed-forward part.
        shared_size: width of what every token enters beside its experts; 0 = there is none.
        routed_scale: multiplies the weights of the routed experts.
        num_groups: groups that the routed experts are cut into ...
        top_groups: ... and how many of them the experts of a token may be of.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    attention_bias: bool
    num_dense_layers: int
    dense_size: int
    shared_size: int
    routed_scale: float
    num_groups: int
    top_groups: int

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return layer >= self.num_dense_layers

    def prompt_flops(self, num_tokens: int) -> PromptFlops:
        """What the attention of a prompt costs in either form.

        A product of a and b numbers counts 2 a b. Per head and pair of a query and an entry up to it, the absorbed form
        takes the R + rotated numbers of a key and the R of a value, the expanded one a key and a value of the head.
        Both multiply by W_uk and by W_uv once per token: the one queries and results, the other entries.
        """
        rank, rotated = self.kv_lora_rank, self.qk_rope_head_dim
        head = self.qk_nope_head_dim + self.v_head_dim
        num_pairs = num_tokens * (num_tokens + 1) // 2
        both = num_tokens * rank * head
        absorbed = num_pairs * (2 * rank + rotated) + both
        expanded = num_pairs * (head + rotated) + both
        return PromptFlops(2 * self.num_q_heads * absorbed, 2 * self.num_q_heads * expanded)


def read_config(fields: Fields, generation: Fields) -> DeepseekV2Config:
    """The configuration from the keys of config.json and generation_config.json.

    Raises:
        CheckpointError: A key has a value that is out of its range or not supported.
    """
    model = read_model(fields, generation, DEFAULTS)
    fields.absent("mlp_bias")
    if not fields.flag("rope_interleave", True):
        raise fields.refuse("rope_interleave", "true or null")
    return DeepseekV2Config(
        **model,
        **_read_attention(fields, model["max_positions"]),
        **_read_experts(fields, model["num_layers"]),
        dense_size=read_width(fields, DEFAULTS, "intermediate_size"),
    )


def _read_attention(fields: Fields, max_positions: int) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", DEFAULTS["num_attention_heads"], 1, MAX_HEADS)
    if fields.get("num_key_value_heads", heads) != heads:
        raise fields.refuse("num_key_value_heads", f"null, or num_attention_heads, {heads}")
    has_latent = fields.values.get("q_lora_rank", DEFAULTS["q_lora_rank"]) is not None
    plain = read_width(fields, DEFAULTS, "qk_nope_head_dim")
    rotated = read_width(fields, DEFAULTS, "qk_rope_head_dim")
    if rotated % 2:
        raise fields.refuse("qk_rope_head_dim", "an even number")
    rope = read_rope(fields, rotated, max_positions, DEFAULTS["rope_theta"])
    return {
        "num_q_heads": heads,
        "q_lora_rank": read_width(fields, DEFAULTS, "q_lora_rank") if has_latent else None,
        "kv_lora_rank": read_width(fields, DEFAULTS, "kv_lora_rank"),
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": read_width(fields, DEFAULTS, "v_head_dim"),
        "rope": dataclasses.replace(rope, is_adjacent=True),
        "softmax_scale": (plain + rotated) ** -0.5 * _read_growth(fields, rope),
        "attention_bias": fields.flag("attention_bias", False),
    }


def _read_growth(fields: Fields, rope: Rope) -> float:
    """What the scores of a stretched text are multiplied by: the square of what queries and keys would be."""
    if rope.kind == "default":
        return 1.0
    scaling = scaling_fields(fields)
    weight = scaling.number("mscale_all_dim", 0.0, 0.0, 1e3)
    amplitude_weight = scaling.number("mscale", 0.0, 0.0, 1e3)
    if rope.kind == "yarn" and bool(weight) != bool(amplitude_weight):
        raise scaling.refuse(
            "mscale_all_dim" if weight else "mscale", "both mscale and mscale_all_dim, or neither"
        )
    return growth(rope.factor, weight) ** 2


def _read_experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    num = fields.integer("n_routed_experts", DEFAULTS["n_routed_experts"], 1, MAX_EXPERTS)
    if fields.get("num_experts", num) != num:
        raise fields.refuse("num_experts", f"the same as n_routed_experts, {num}")
    fields.choice("scoring_func", "softmax", ("softmax",))
    if fields.flag("norm_topk_prob", False):
        # One published code scales such weights by routed_scaling_factor too, another does not, a third ignores it.
        raise fields.refuse("norm_topk_prob", "false or null")
    fields.integer("moe_layer_freq", 1, 1, 1)
    num_dense = fields.integer("first_k_dense_replace", 0, 0, MAX_LAYERS)
    # Only a model that is dense altogether may leave this out.
    implied = None if num_dense < num_layers else 1
    top_k = fields.integer("num_experts_per_tok", implied, 1, num)
    expert_size = read_width(fields, DEFAULTS, "moe_intermediate_size")
    has_shared = fields.values.get("n_shared_experts", 0) is not None
    num_shared = fields.integer("n_shared_experts", DEFAULTS["n_shared_experts"], 0, MAX_EXPERTS)
    num_groups, top_groups = _read_groups(fields, num, top_k)
    return {
        "num_experts": num,
        "num_experts_per_tok": top_k,
        "expert_size": expert_size,
        "num_dense_layers": num_dense,
        "shared_size": num_shared * expert_size if has_shared else 0,
        "routed_scale": fields.number("routed_scaling_factor", 1.0, 0.0, MOST_SCALING),
        "num_groups": num_groups,
        "top_groups": top_groups,
    }


def _read_groups(fields: Fields, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token's experts may be of; one of one where there is no limit."""
    if fields.choice("topk_method", "greedy", TOPK_METHODS) == "greedy":
        return 1, 1  # n_group and topk_group mean nothing then
    num_groups = fields.integer("n_group", None, 1, num_experts)
    if num_experts % num_groups:
        raise fields.refuse("n_group", f"a divisor of n_routed_experts, {num_experts}")
    top_groups = fields.integer("topk_group", None, 1, num_groups)
    if top_k > top_groups * (num_experts // num_groups):
        raise fields.refuse(
            "topk_group", f"groups of at least num_experts_per_tok, {top_k}, experts"
        )
    return num_groups, top_groups
