"""Writes tiny random checkpoints in the published layout, in any shape that the families' configs allow."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 24,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": 8,  # as transformers writes it: qk_rope_head_dim
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}


def make_config(family, **changes):
    """config.json of a tiny model; a change to `...` leaves the key out."""
    config = {"model_type": family, **COMMON, **FAMILIES[family], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def tensor_shapes(config):
    """Published name -> shape of every tensor of the model."""
    return latent_shapes(config) if config["model_type"] == "deepseek_v2" else gqa_shapes(config)


def latent_shapes(c):
    """The same for DeepSeek-V2."""
    width, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    plain, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], width)

    def add_ffn(prefix, size):
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.{name}.weight"] = (size, width)
        shapes[f"{prefix}.down_proj.weight"] = (width, size)

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        attention = {
            "kv_a_proj_with_mqa.weight": (rank + rotated, width),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (plain + value), rank),
            "o_proj.weight": (width, heads * value),
        }
        q_rank, q_width = c["q_lora_rank"], heads * (plain + rotated)
        if q_rank is None:
            attention["q_proj.weight"] = (q_width, width)
        else:
            attention["q_a_proj.weight"] = (q_rank, width)
            attention["q_a_layernorm.weight"] = (q_rank,)
            attention["q_b_proj.weight"] = (q_width, q_rank)
        if c.get("attention_bias"):
            for name in {"kv_a_proj_with_mqa", "o_proj", "q_a_proj"} & {n[:-7] for n in attention}:
                attention[f"{name}.bias"] = attention[f"{name}.weight"][:1]
        shapes |= {f"{p}self_attn.{name}": shape for name, shape in attention.items()}
        shapes[p + "input_layernorm.weight"] = (width,)
        shapes[p + "post_attention_layernorm.weight"] = (width,)
        if i < c["first_k_dense_replace"]:
            add_ffn(p + "mlp", c["intermediate_size"])
            continue
        shapes[p + "mlp.gate.weight"] = (c["n_routed_experts"], width)
        for e in range(c["n_routed_experts"]):
            add_ffn(f"{p}mlp.experts.{e}", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            add_ffn(p + "mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
    return shapes


def gqa_shapes(c):
    """The same for the families with grouped-query attention."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    dim = c.get("head_dim") or width // heads
    num_experts = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
    is_qwen = c["model_type"] == "qwen3_moe"
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], width)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = (width,)
        shapes[p + "post_attention_layernorm.weight"] = (width,)
        outs = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim, "o": width}
        for name, num in outs.items():
            shapes[f"{p}self_attn.{name}_proj.weight"] = (
                num,
                heads * dim if name == "o" else width,
            )
            if c.get("attention_bias"):
                shapes[f"{p}self_attn.{name}_proj.bias"] = (num,)
        if is_qwen:
            shapes |= {f"{p}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        block = "mlp" if is_qwen else "block_sparse_moe"
        names = ("gate_proj", "up_proj", "down_proj") if is_qwen else ("w1", "w3", "w2")
        step = c.get("decoder_sparse_step", 1)
        dense = i in (c.get("mlp_only_layers") or []) or num_experts == 0 or (i + 1) % step
        size = c["intermediate_size"]
        prefixes = [f"{p}{block}."]
        if not dense:
            size = c["moe_intermediate_size"] if is_qwen else size
            shapes[f"{p}{block}.gate.weight"] = (num_experts, width)
            prefixes = [f"{p}{block}.experts.{e}." for e in range(num_experts)]
        for prefix in prefixes:
            for name, shape in zip(names, ((size, width),) * 2 + ((width, size),), strict=True):
                shapes[f"{prefix}{name}.weight"] = shape
    return shapes


def draw_tensors(config, seed):
    """Random weights; norms, biases and all, so that no path hides behind a zero or a one."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[config.get("dtype", "bfloat16")]
    tensors = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        x = rng.standard_normal(shape)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif len(shape) == 1:
            x = 0.5 * x
        elif "embed_tokens" not in name:
            x = x * 1.2 / shape[-1] ** 0.5
        tensors[name] = x.astype(dtype)
    return tensors


def fuse(tensors):
    """The same weights under the names that transformers gives them in memory."""
    fused = {}
    experts = {}
    for name, x in tensors.items():
        if ".experts." in name:
            prefix, rest = name.split(".experts.")
            number, kind = rest.removesuffix(".weight").split(".")
            prefix = prefix.replace("block_sparse_moe", "mlp")
            kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(kind, kind)
            experts.setdefault(prefix, {}).setdefault(kind, {})[int(number)] = x
        else:
            fused[name.replace("block_sparse_moe", "mlp")] = x
    for prefix, kinds in experts.items():
        gate, up, down = (
            np.stack([kinds[kind][e] for e in range(len(kinds[kind]))])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        fused[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{prefix}.experts.down_proj"] = down
    return fused


def write_tensors(directory, tensors, shards=1):
    """model.safetensors, or that many shards and their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]  # interleaved, so that every layer's experts lie in several files
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(
    directory, family="qwen3_moe", *, seed=0, shards=1, fused=False, generation=None, **changes
):
    """Writes a checkpoint of random weights and returns its directory.

    Args:
        directory: is created.
        family: a key of FAMILIES.
        seed: of the weights.
        shards: number of safetensors files; more than one come with an index.
        fused: store the experts under transformers' in-memory names.
        generation: content of generation_config.json, if there is to be one.
        changes: keys of config.json that differ; `...` leaves a key out.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config(family, **changes)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    tensors = draw_tensors(config, seed)
    write_tensors(directory, fuse(tensors) if fused else tensors, shards)
    return directory
