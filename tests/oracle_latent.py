"""The oracle for DeepSeek-V2: keys and values of every head, as the published equations have them.

Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1 and 2.2, and DeepSeek's published code for what they leave open.
"""

import math

import numpy as np

from tests.oracle import Oracle, angles, rms, silu, softmax

LATENT_EPS = 1e-6


def rotate_pairs(x, angle, amplitude):
    """x [B, T, heads, dim]: pairs (2i, 2i + 1) turn by angle [T, dim / 2]."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * amplitude * np.exp(1j * angle)[:, None]
    turned = np.empty_like(x)
    turned[..., 0::2], turned[..., 1::2] = z.real, z.imag
    return turned


class LatentOracle(Oracle):
    """The model of family deepseek_v2 in a directory."""

    def _attention(self, h, p):
        t, c = self.tensors, self.config
        batch, num, _ = h.shape
        heads, rank = c["num_attention_heads"], c["kv_lora_rank"]
        plain, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]

        def linear(x, name):
            return x @ t[f"{p}{name}.weight"].T + t.get(f"{p}{name}.bias", 0)

        if c["q_lora_rank"] is None:
            q = linear(h, "q_proj")
        else:
            latent = rms(linear(h, "q_a_proj"), t[p + "q_a_layernorm.weight"], LATENT_EPS)
            q = linear(latent, "q_b_proj")
        q = q.reshape(batch, num, heads, plain + rotated)
        down = linear(h, "kv_a_proj_with_mqa")
        latent = rms(down[..., :rank], t[p + "kv_a_layernorm.weight"], LATENT_EPS)
        up = linear(latent, "kv_b_proj").reshape(batch, num, heads, plain + value)
        angle, amplitude = angles(c, rotated, num)
        q_rotated = rotate_pairs(q[..., plain:], angle, amplitude)
        k_rotated = rotate_pairs(down[..., None, rank:], angle, amplitude)[:, :, 0]
        o = np.empty((batch, num, heads, value))
        future = np.triu(np.full((num, num), -np.inf), 1)
        for head in range(heads):
            scores = q[:, :, head, :plain] @ up[:, :, head, :plain].swapaxes(1, 2)
            scores = scores + q_rotated[:, :, head] @ k_rotated.swapaxes(1, 2)
            weights = softmax(scores * self._scale() + future)
            o[:, :, head] = weights @ up[:, :, head, plain:]
        return linear(o.reshape(batch, num, -1), "o_proj")

    def _scale(self):
        c = self.config
        scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
        scale = 1 / math.sqrt(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default" and scaling.get("mscale_all_dim") and scaling["factor"] > 1:
            scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
        return scale

    def _feed_forward(self, h, layer):
        c = self.config
        p = f"model.layers.{layer}.mlp."
        if layer < c["first_k_dense_replace"]:
            return self._swiglu(h, p)
        out = self._swiglu(h, p + "shared_experts.") if c["n_shared_experts"] else np.zeros_like(h)
        probs = softmax(h @ self.tensors[p + "gate.weight"].T)
        for n, row in enumerate(probs):
            allowed = self._allowed(row)
            ranked = sorted(allowed, key=lambda e: -row[e])
            chosen, rest = np.split(ranked, [c["num_experts_per_tok"]])
            self._note_gap(row[chosen], row[rest])
            for e in chosen:
                y = self._swiglu(h[n], f"{p}experts.{e}.")
                out[n] += c["routed_scaling_factor"] * row[e] * y
        return out

    def _allowed(self, probs):
        """The experts of the groups whose best experts are the likeliest."""
        c = self.config
        if c["topk_method"] == "greedy":
            return range(probs.size)
        groups = np.arange(probs.size).reshape(c["n_group"], -1)
        best = probs[groups].max(1)
        order = np.argsort(-best, kind="stable")
        kept, rest = np.split(order, [c["topk_group"]])
        self._note_gap(best[kept], best[rest])
        return groups[kept].reshape(-1)

    def _note_gap(self, taken, left):
        if left.size:
            self.router_gap = min(self.router_gap, float(taken.min() - left.max()))

    def _swiglu(self, h, p):
        gate, up, down = (self.tensors[f"{p}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(h @ gate.T) * (h @ up.T)) @ down.T
