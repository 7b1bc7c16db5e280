"""Finds the family of a checkpoint, and builds its model: from the checkpoint, at random, or only as shapes."""

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wscope_jax.arguments import MOST_SEED, instance, integer, shown
from wscope_jax.checkpoint import (
    Checkpoint,
    Place,
    Stored,
    locate,
    open_directory,
    read_json,
    require_path,
    show,
)
from wscope_jax.errors import CapacityError, CheckpointError, UsageError, is_out_of_memory
from wscope_jax.models import deepseek_v2, mixtral, qwen3_moe
from wscope_jax.models.config import ModelConfig
from wscope_jax.models.decoder import Decoder
from wscope_jax.models.drawing import PRNG, draw
from wscope_jax.models.fields import Fields
from wscope_jax.models.tensors import EMBEDDING, HEAD, Key, Table

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(getattr(jnp, name)) for name in ("bfloat16", "float32")
}
STORED_DTYPES: Final[Mapping[str, str]] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

MOST_LISTED: Final = 100_000  # experts whose absence is told one by one
LAYER: Final = re.compile(r"model\.layers\.([0-9]{1,6})\.")

log = logging.getLogger("wscope_jax")


class Family(NamedTuple):
    """What the registry knows of a family.

    Attributes:
        architecture: the class that its config.json names.
        read: its configuration from the keys of config.json and generation_config.json.
        build: its model with parameters of zeros, from a configuration and a dtype.
        table: where a checkpoint stores each parameter.
    """

    architecture: str
    read: Callable[[Fields, Fields], Any]
    build: Callable[[Any, np.dtype[Any]], Decoder]
    table: Callable[[Any], Table]


BY_TYPE: Final[Mapping[str, Family]] = {
    "mixtral": Family(
        "MixtralForCausalLM", mixtral.read_config, mixtral.Mixtral, mixtral.weight_table
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qwen3_moe.read_config, qwen3_moe.Qwen3Moe, qwen3_moe.weight_table
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        deepseek_v2.read_config,
        deepseek_v2.DeepseekV2,
        deepseek_v2.weight_table,
    ),
}


def read_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of the checkpoint in `directory`, of the class of its family.

    Stop ids are those of generation_config.json where it names any. Code that a checkpoint brings along (`auto_map`)
    is never executed.

    Raises:
        CheckpointError: The directory or a file is missing or broken, the architecture is unknown, or a key has a
            value that this package does not honour.
    """
    root = open_directory(directory)
    path = locate(root, "config.json")
    if path is None:
        raise CheckpointError(f"{root}: no config.json; name the folder of a whole checkpoint")
    return read_file(path, locate(root, "generation_config.json"))


def read_file(path: Path, generation: Path | None = None) -> ModelConfig:
    """The configuration in one file with the keys of a config.json; see `read_config`.

    Args:
        path: the file.
        generation: a generation_config.json, or None if there is none.

    Raises:
        CheckpointError: See `read_config`.
    """
    require_path("path", path)
    fields = Fields(read_json(path), path)
    family = _find_family(fields)
    generation_values = {} if generation is None else read_json(generation)
    config = family.read(fields, Fields(generation_values, generation or path))
    assert isinstance(config, ModelConfig)
    return config


def _find_family(fields: Fields) -> Family:
    model_type = fields.values.get("model_type")
    remote = "auto_map" in fields.values
    family = BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    classes = fields.values.get("architectures")
    if family is not None and classes in (None, [family.architecture]):
        if remote:
            log.warning("%s: auto_map is ignored; our own %s is used", fields.path, model_type)
        return family
    known = ", ".join(f"{name} ({entry.architecture})" for name, entry in BY_TYPE.items())
    hint = "; the code that auto_map names is never executed" if remote else ""
    raise CheckpointError(
        f"{fields.path}: model_type {show(model_type)} with architectures {show(classes)} is not "
        f"supported; supported are {known}{hint}"
    )


def abstract(config: ModelConfig, dtype: str) -> Decoder:
    """The model of `config` with shapes in place of arrays; takes no memory.

    Args:
        config: what `read_config` returned.
        dtype: "bfloat16" or "float32", the dtype of all parameters.

    Raises:
        UsageError: `dtype` is another, or `config` is none.
    """
    instance("config", config, ModelConfig, "what models.read_config(directory) returns")
    build, number = BY_TYPE[config.model_type].build, _dtype(dtype)
    return nnx.eval_shape(lambda: build(config, number))


def random(config: ModelConfig, seed: int, dtype: str) -> Decoder:
    """The model of `config` with random weights that keep activations near one, drawn on the default device.

    The host holds no copy of them, and the device little more than what is kept.

    Args:
        config: what `read_config` returned.
        seed: 0 to 2**63 - 1; equal seeds give equal weights.
        dtype: "bfloat16" or "float32".

    Raises:
        CapacityError: The weights do not fit into memory.
        UsageError: `dtype` is another, `config` is none, or the seed is out of range.
    """
    seed = integer("seed", seed, 0, MOST_SEED)
    graphdef, state = nnx.split(abstract(config, dtype))
    leaves, tree = jax.tree.flatten(state)
    words = jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    keys = jax.random.split(jax.random.wrap_key_data(words, impl=PRNG), len(leaves))
    try:
        drawn = [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
        jax.block_until_ready(drawn)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = sum(leaf.size for leaf in leaves) * _dtype(dtype).itemsize
        raise CapacityError(
            f"weights: no memory for {num_bytes / 1e9:.2f} GB of random {dtype}; free some, or choose a smaller model"
        ) from error
    return nnx.merge(graphdef, jax.tree.unflatten(tree, drawn))


def load(
    directory: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    report: Callable[[int, int], None] | None = None,
    check_all: bool = False,
) -> Decoder:
    """The model of the checkpoint in `directory`, its weights placed on the default device.

    Args:
        directory: folder with config.json and safetensors files.
        dtype: "bfloat16" or "float32" for all parameters; None takes the checkpoint's.
        report: told how many bytes of parameters are in place, and of how many.
        check_all: look at every number for NaN and infinity, not at a sample.

    Raises:
        CapacityError: The weights do not fit into memory.
        CheckpointError: Anything is wrong with the checkpoint; see `read_config` and `Checkpoint`.
        UsageError: `dtype` is another.
    """
    if dtype is not None:
        _dtype(dtype)
    config = read_config(directory)  # before the headers: what is wrong with it is plainer
    checkpoint = Checkpoint(directory)
    config = _settle(config, checkpoint)
    if dtype is None:
        dtype = choose_dtype(config.dtype, checkpoint.tensors, checkpoint.directory)
    graphdef, state = nnx.split(abstract(config, dtype))
    wanted, variables = _places(config, state), dict(nnx.to_flat_state(state))
    placed: dict[Key, Any] = {}
    for key, array in checkpoint.load(wanted, _dtype(dtype), report=report, check_all=check_all):
        placed[key] = variables[key].replace(array)
    return nnx.merge(graphdef, nnx.from_flat_state(placed))


def places(config: ModelConfig, checkpoint: Checkpoint) -> list[Place]:
    """Where the checkpoint may store each parameter of the model that `load` makes of it.

    Raises:
        UsageError: An argument is none of these.
        CheckpointError: The number of layers is far from what is stored.
    """
    instance("config", config, ModelConfig, "what models.read_config(directory) returns")
    instance("checkpoint", checkpoint, Checkpoint, "Checkpoint(directory)")
    config = _settle(config, checkpoint)
    return _places(config, nnx.state(abstract(config, "bfloat16")))


def choose_dtype(
    named: str | None, tensors: Mapping[str, Stored], where: Path, default: str = ""
) -> str:
    """The dtype for weights and cache that a checkpoint asks for.

    Args:
        named: what its config.json names, if it does; else it is the dtype of its embedding, or of its first tensor.
        tensors: what it stores.
        where: its folder or file, for the message.
        default: for a checkpoint whose dtype is none of numbers as they are, or which has no tensors.

    Raises:
        CheckpointError: It is one that nothing is computed in.
    """
    stored = tensors.get(EMBEDDING) or next(iter(tensors.values()), None)
    name = named or STORED_DTYPES.get(stored.dtype if stored else "", default)
    if name not in DTYPES:
        raise CheckpointError(
            f"{where}: its dtype is {show(name)}; choose dtype float32 (exact) or bfloat16 yourself"
        )
    return name


def _settle(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of what is stored: a head beside the embedding counts, whatever config.json says."""
    _check_layers(config, checkpoint)
    if config.tie_word_embeddings and {HEAD, EMBEDDING} <= checkpoint.tensors.keys():
        return dataclasses.replace(config, tie_word_embeddings=False)
    return config


def _places(config: ModelConfig, state: nnx.State[Any, Any]) -> list[Place]:
    table = BY_TYPE[config.model_type].table(config)
    variables = dict(nnx.to_flat_state(state))
    assert table.keys() == variables.keys()
    return [
        Place(key, shape := tuple(variables[key].shape), [way(shape) for way in ways])
        for key, ways in table.items()
    ]


def _check_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuses a number of layers far from what is stored, before millions of missing tensors are listed."""
    found = (LAYER.match(name) for name in checkpoint.tensors)
    stored = 1 + max((int(match[1]) for match in found if match is not None), default=-1)
    per_layer = max(1, getattr(config, "num_experts", 0))
    if config.num_layers > 2 * stored > 0 and config.num_layers * per_layer > MOST_LISTED:
        raise CheckpointError(
            f"{checkpoint.directory}: num_hidden_layers in config.json is {config.num_layers}, the files have "
            f"tensors of {stored} layers; its files and its config.json do not belong together"
        )


def _dtype(name: str) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(
            f"dtype: {shown(name)} is not supported; choose one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]
