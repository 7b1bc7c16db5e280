"""Writes the trained model as a published checkpoint: one safetensors tensor per expert, bfloat16, and a tokenizer."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from demo_model.network import Params, Shape

FFN = ("gate", "up", "down")
OUTER = {
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "norm": "model.norm.weight",
}
INNER = {
    "attention_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router": "mlp.gate.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
}


def write(directory: Path, params: Params, shape: Shape, max_positions: int) -> None:
    """Writes the four files of the checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {OUTER[name]: params[name] for name in OUTER}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        stacked = {name: array[layer] for name, array in params["layers"].items()}
        tensors |= {prefix + stored: stacked[name] for name, stored in INNER.items()}
        for name in FFN:
            for expert, array in enumerate(stacked[name]):
                tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = array
    # Contiguous copies: safetensors writes the memory of an array, whatever its strides.
    stored = {
        name: np.ascontiguousarray(np.asarray(array), ml_dtypes.bfloat16)
        for name, array in tensors.items()
    }
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(shape, max_positions))
    _write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": None})
    tokenizer().save(str(directory / "tokenizer.json"))


def read(directory: Path, shape: Shape) -> Params:
    """The parameters in a checkpoint that `write` wrote, float32."""
    tensors = load_file(directory / "model.safetensors")
    stored = {name: array.astype(np.float32) for name, array in tensors.items()}

    def layers(stored_name: str) -> np.ndarray:
        return np.stack(
            [stored[f"model.layers.{i}.{stored_name}"] for i in range(shape.num_layers)]
        )

    inner: Params = {name: layers(stored_name) for name, stored_name in INNER.items()}
    for name in FFN:
        experts = (f"mlp.experts.{e}.{name}_proj.weight" for e in range(shape.num_experts))
        inner[name] = np.stack([layers(expert) for expert in experts], axis=1)
    return {**{name: stored[OUTER[name]] for name in OUTER}, "layers": inner}


def tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer whose ids are the bytes of the text."""
    # The byte-level alphabet: printable bytes stand for themselves, the others for what follows 255.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def _config(shape: Shape, max_positions: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": None,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,  # of dense layers: there are none
        "max_position_embeddings": max_positions,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_q_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "ascii")
