"""An independent forward pass in numpy float64, from the published equations and a checkpoint's files alone.

It shares no code with the package: not the reading of files, not the rotation, not the experts. It knows the two
families with grouped-query attention and every key of their config.json that the package honours.
"""

import json
import math
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16}


def read_tensors(directory):
    """Every tensor of the safetensors files in a directory, as float64 by name."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = (8 + size + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":  # the upper half of a float32
                bits = np.frombuffer(raw[first:last], np.uint16).astype(np.uint32) << 16
                numbers = bits.view(np.float32)
            else:
                numbers = np.frombuffer(raw[first:last], DTYPES[entry["dtype"]])
            tensors[name] = numbers.astype(np.float64).reshape(entry["shape"])
    return tensors


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def angles(config, dim, num):
    """Angle of each position and pair [num, dim / 2], and the amplitude of cosine and sine."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    default = 1e6 if config["model_type"] == "mixtral" else 1e4
    base = scaling.get("rope_theta", config.get("rope_theta", default))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    freq = np.array([base ** (-2 * i / dim) for i in range(dim // 2)])
    amplitude = 1.0
    original = config.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings", config["max_position_embeddings"]
    )
    if kind == "linear":
        freq /= scaling["factor"]
    elif kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        for i, f in enumerate(freq):
            wavelength = 2 * math.pi / f
            if wavelength > original / low:
                freq[i] = f / scaling["factor"]
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                freq[i] = (1 - smooth) * f / scaling["factor"] + smooth * f
    elif kind == "yarn":
        factor = scaling.get("factor") or config["max_position_embeddings"] / original
        fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1

        def corr(turns):
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = corr(fast), corr(slow)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        for i, f in enumerate(freq):
            ramp = min(max((i - low) / (high - low), 0), 1)
            freq[i] = f / factor * ramp + f * (1 - ramp)

        def grown(m):
            return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

        amplitude = grown(1)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            amplitude = grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
        amplitude = scaling.get("attention_factor", amplitude)
    else:
        assert kind == "default"
    return np.arange(num)[:, None] * freq, amplitude


def rotate(x, angle, amplitude):
    """x [B, T, heads, dim]: pairs (i, i + dim / 2) turn by angle [T, dim / 2]."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * amplitude * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


class Oracle:
    """The model in a directory.

    Attributes:
        router_gap: narrowest gap seen between the last expert taken and the first one left out, in probability:
            where it is near the rounding of what is tested, another expert may be taken there.
    """

    def __init__(self, directory):
        self.config = json.loads((Path(directory) / "config.json").read_text())
        self.tensors = read_tensors(directory)
        self.router_gap = math.inf

    def logits(self, ids):
        """Logits [B, T, vocabulary] of ids [B, T]."""
        t, c = self.tensors, self.config
        eps = c["rms_norm_eps"]
        x = t["model.embed_tokens.weight"][np.asarray(ids)]
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            x = x + self._attention(rms(x, t[p + "input_layernorm.weight"], eps), p + "self_attn.")
            h = rms(x, t[p + "post_attention_layernorm.weight"], eps)
            x = x + self._feed_forward(h.reshape(-1, h.shape[-1]), i).reshape(x.shape)
        head = "lm_head.weight" if "lm_head.weight" in t else "model.embed_tokens.weight"
        return rms(x, t["model.norm.weight"], eps) @ t[head].T

    def _attention(self, h, p):
        t, c = self.tensors, self.config
        batch, num, width = h.shape
        heads = c["num_attention_heads"]
        kv_heads = c.get("num_key_value_heads") or heads
        dim = c.get("head_dim") or width // heads

        def linear(x, name):
            y = x @ t[f"{p}{name}_proj.weight"].T
            return y + t[f"{p}{name}_proj.bias"] if c.get("attention_bias") else y

        q, k, v = (linear(h, name).reshape(batch, num, -1, dim) for name in "qkv")
        if c["model_type"] == "qwen3_moe":
            q = rms(q, t[p + "q_norm.weight"], c["rms_norm_eps"])
            k = rms(k, t[p + "k_norm.weight"], c["rms_norm_eps"])
        angle, amplitude = angles(c, dim, num)
        q, k = rotate(q, angle, amplitude), rotate(k, angle, amplitude)
        o = np.empty_like(q)
        future = np.triu(np.full((num, num), -np.inf), 1)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = np.einsum("btd,bsd->bts", q[:, :, head], k[:, :, kv]) / math.sqrt(dim)
            o[:, :, head] = softmax(scores + future) @ v[:, :, kv]
        return linear(o.reshape(batch, num, -1), "o")

    def _feed_forward(self, h, layer):
        t, c = self.tensors, self.config
        p = f"model.layers.{layer}."
        num_experts = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
        if c["model_type"] == "mixtral":
            p, names, normalise = p + "block_sparse_moe.", ("w1", "w3", "w2"), True
        else:
            p, names, normalise = p + "mlp.", ("gate_proj", "up_proj", "down_proj"), False
            normalise = c.get("norm_topk_prob", False)
            dense = layer in (c.get("mlp_only_layers") or [])
            if dense or num_experts == 0 or (layer + 1) % c.get("decoder_sparse_step", 1):
                gate, up, down = (t[f"{p}{name}.weight"] for name in names)
                return (silu(h @ gate.T) * (h @ up.T)) @ down.T
        top_k = c["num_experts_per_tok"]
        probs = softmax(h @ t[p + "gate.weight"].T)
        order = np.argsort(-probs, axis=-1, kind="stable")
        if top_k < num_experts:
            edge = np.take_along_axis(probs, order[:, top_k - 1 : top_k + 1], -1)
            self.router_gap = min(self.router_gap, float((edge[:, 0] - edge[:, 1]).min()))
        out = np.zeros_like(h)
        for n, chosen in enumerate(order[:, :top_k]):
            weights = probs[n, chosen]
            if normalise:
                weights = weights / weights.sum()
            for e, weight in zip(chosen, weights, strict=True):
                gate, up, down = (t[f"{p}experts.{e}.{name}.weight"] for name in names)
                out[n] += weight * (down @ (silu(gate @ h[n]) * (up @ h[n])))
        return out
