"""Where a checkpoint stores each parameter: ways of reading one, and the tables that the families share."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from wscope_jax.checkpoint import Piece
from wscope_jax.models.config import ModelConfig

Key = tuple[Any, ...]  # path of a parameter in the model's state
Way = Callable[[tuple[int, ...]], Sequence[Piece]]  # from the parameter's shape to what fills it
Table = Mapping[Key, Sequence[Way]]  # the published way first

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


def whole(name: str) -> Way:
    """The parameter is one stored tensor."""
    return lambda shape: (Piece(name, shape),)


def stacked(names: Sequence[str]) -> Way:
    """Each slice along the first axis is a stored tensor."""
    return lambda shape: tuple(Piece(name, shape[1:]) for name in names)


def part(name: str, index: int, num: int) -> Way:
    """The parameter [E, F, M] is rows index * F to (index + 1) * F of each slice of a stored [E, num * F, M]."""

    def pieces(shape: tuple[int, ...]) -> Sequence[Piece]:
        num_slices, rows, *rest = shape
        stored, size = (num_slices, num * rows, *rest), math.prod(shape[1:])
        return tuple(Piece(name, stored, (e * num + index) * size) for e in range(num_slices))

    return pieces


def outer_table(config: ModelConfig) -> dict[Key, Sequence[Way]]:
    """Embedding, last norm and head."""
    table: dict[Key, Sequence[Way]] = {
        ("embedding",): [whole(EMBEDDING)],
        ("norm", "weight"): [whole("model.norm.weight")],
    }
    if config.tie_word_embeddings:
        table["embedding",] = [whole(EMBEDDING), whole(HEAD)]  # either stands for both
    else:
        table["head",] = [whole(HEAD)]
    return table


def attention_table(layer: int, parameters: Sequence[str]) -> dict[Key, Sequence[Way]]:
    """The norms of a layer, and its attention's parameters by their published names ("q_proj.weight")."""
    prefix = f"model.layers.{layer}"
    table: dict[Key, Sequence[Way]] = {
        ("layers", layer, "attention_norm", "weight"): [whole(f"{prefix}.input_layernorm.weight")],
        ("layers", layer, "ffn_norm", "weight"): [
            whole(f"{prefix}.post_attention_layernorm.weight")
        ],
    }
    for name in parameters:
        key = ("layers", layer, "attention", *name.split("."))
        table[key] = [whole(f"{prefix}.self_attn.{name}")]
    return table


def ffn_table(key: Key, block: str, names: Sequence[str]) -> dict[Key, Sequence[Way]]:
    """A dense feed-forward part at `key`, whose published name is `block`, by the names of its matrices."""
    return {(*key, name, "weight"): [whole(f"{block}.{name}.weight")] for name in names}


def experts_table(
    layer: int, num_experts: int, block: str, names: tuple[str, str, str]
) -> dict[Key, Sequence[Way]]:
    """Router and experts of a layer.

    Args:
        layer: its index.
        num_experts: E.
        block: published name of the feed-forward part ("mlp").
        names: published names of gate, up and down in an expert ("gate_proj", ...).
    """
    prefix = f"model.layers.{layer}"
    fused = f"{prefix}.mlp.experts"  # how transformers holds them in memory, whatever the family

    def each(name: str) -> Way:
        return stacked([f"{prefix}.{block}.experts.{e}.{name}.weight" for e in range(num_experts)])

    gate, up, down = names
    key = ("layers", layer, "ffn")
    return {
        (*key, "router"): [
            whole(f"{prefix}.{block}.gate.weight"),
            whole(f"{prefix}.mlp.gate.weight"),
        ],
        (*key, "gate"): [each(gate), part(f"{fused}.gate_up_proj", 0, 2)],
        (*key, "up"): [each(up), part(f"{fused}.gate_up_proj", 1, 2)],
        (*key, "down"): [each(down), whole(f"{fused}.down_proj")],
    }
