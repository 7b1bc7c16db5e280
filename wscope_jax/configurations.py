"""What a plan needs to know of a model, by its checkpoint's config and headers or by a configuration in the package.

The layouts of DeepSeek-V4 stand here until that family has a model.
"""

import importlib.resources
import logging
import math
import re
from collections.abc import Callable, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
from flax import nnx

from wscope_jax.checkpoint import Checkpoint, Stored, locate, naming, open_directory, read_json
from wscope_jax.checkpoint.headers import INDEX
from wscope_jax.checkpoint.tensors import IGNORED
from wscope_jax.errors import CheckpointError
from wscope_jax.footprint import PlannedStream
from wscope_jax.layout import EntryLayout, Stream
from wscope_jax.models import BY_TYPE, abstract, read_config, read_file
from wscope_jax.models.config import MAX_LAYERS, MAX_WIDTH, ModelConfig, read_dtype
from wscope_jax.models.fields import Fields
from wscope_jax.models.registry import STORED_DTYPES, choose_dtype, places
from wscope_jax.models.rope import MAX_POSITIONS

log = logging.getLogger(__name__)

ITEM_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}

Streams = tuple[tuple[Stream, ...], ...]


class Configuration(NamedTuple):
    """A model as a plan sees it.

    Attributes:
        name: of the shipped configuration, or the checkpoint's folder.
        model_type: its family.
        streams: per layer what it stores.
        num_parameters: numbers in its weights.
        dtype: of weights and cache, "bfloat16" or "float32".
        weight_bytes: of the weights in that dtype, or as they are published where these are quantised.
        position_limit: positions that the model was made for.
        has_model: this package can run it.
    """

    name: str
    model_type: str
    streams: Streams
    num_parameters: int
    dtype: str
    weight_bytes: int
    position_limit: int
    has_model: bool


def names() -> tuple[str, ...]:
    """The configurations that ship with the package."""
    found = (Path(file.name) for file in _folder().iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".json"))


def read(model: str, dtype: str | None = None) -> Configuration:
    """The configuration called `model`, or that of the checkpoint in the directory `model`.

    Of a checkpoint with weights all headers are read, and no weights; config.json alone is enough, too.

    Args:
        model: name or directory.
        dtype: "bfloat16" or "float32" for weights and cache; None takes the checkpoint's.

    Raises:
        CheckpointError: There is neither, or anything about the checkpoint is wrong.
    """
    with naming(Path(model)):
        is_there = Path(model).exists()
    if not is_there and model in names():
        with importlib.resources.as_file(_folder() / f"{model}.json") as file:
            return _describe(model, Fields(read_json(file), file), {}, dtype)
    try:
        root = open_directory(model)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or one of {', '.join(names())}") from None
    path = locate(root, "config.json")
    if path is None:
        raise CheckpointError(f"{root}: no config.json; name the folder of a whole checkpoint")
    fields = Fields(read_json(path), path)
    if fields.values.get("model_type") not in list(_OTHERS):
        read_config(root)  # raises what the loader would raise
    with naming(root):
        own_name, has_files = root.resolve().name, any(root.glob("*.safetensors"))
    has_weights = has_files or locate(root, INDEX) is not None
    tensors = _read_tensors(root, fields) if has_weights else {}
    return _describe(own_name, fields, tensors, dtype)


def read_alone(model: str, dtype: str | None = None) -> tuple[Configuration, ModelConfig]:
    """A configuration that is to be run with weights of its own making; no weights are looked for.

    Args:
        model: name of one that ships with the package, or the path of a config.json or of its folder.
        dtype: "bfloat16" or "float32" for weights and cache; None takes that of the configuration. A
            generation_config.json beside it is not read: its end tokens mean nothing to such weights.

    Returns:
        The model as a plan sees it, and its configuration.

    Raises:
        CheckpointError: There is none, anything is wrong with it, or this package cannot run its family.
    """
    path = Path(model)
    with naming(path):
        is_there, is_file = path.exists(), path.is_file()
    if not is_there and model in names():
        with importlib.resources.as_file(_folder() / f"{model}.json") as file:
            return _read_alone(model, file, dtype)
    if not is_there:
        raise CheckpointError(
            f"{model}: neither a configuration nor a path; give a config.json or one of {', '.join(names())}"
        )
    found = path if is_file else locate(open_directory(path), "config.json")
    if found is None:
        raise CheckpointError(f"{model}: no config.json there; name its folder, or the file itself")
    return _read_alone(model, found, dtype)


def _read_alone(name: str, file: Path, dtype: str | None) -> tuple[Configuration, ModelConfig]:
    config = read_file(file)
    return _describe(name, Fields(read_json(file), file), {}, dtype), config


def _read_tensors(root: Path, fields: Fields) -> Mapping[str, Stored]:
    """The tensors of a checkpoint by name; of a model that can be run they are those that the loader wants."""
    checkpoint = Checkpoint(root)
    are_plain = all(tensor.dtype in STORED_DTYPES for tensor in checkpoint.tensors.values())
    if fields.values.get("model_type") in list(BY_TYPE) and are_plain:
        checkpoint.require_whole(places(read_config(root), checkpoint))
    return checkpoint.tensors


def stored_bytes(tensor: Stored) -> int:
    """Bytes of a tensor in its file: the dtype's name says the bits of a number ("BF16", "F8_E4M3")."""
    bits = re.search("[0-9]+", tensor.dtype)
    return math.prod(tensor.shape) * (int(bits[0]) if bits else 8) // 8


def _folder() -> Traversable:
    return importlib.resources.files("wscope_jax") / "assets" / "configs"


def _describe(
    name: str, fields: Fields, tensors: Mapping[str, Stored], dtype: str | None
) -> Configuration:
    model_type = fields.get("model_type")
    tensors = {key: tensor for key, tensor in tensors.items() if not IGNORED.search(key)}
    if model_type in _OTHERS:
        streams = _OTHERS[model_type](fields)
        limit = fields.integer("max_position_embeddings", None, 1, MAX_POSITIONS)
        count = 0 if tensors else fields.integer("num_parameters", None, 1, 1 << 50)
    else:
        config: ModelConfig = BY_TYPE[model_type].read(fields, Fields({}, fields.path))
        if not tensors:  # which would contradict it
            _tell_defaults(fields, config)
        model = abstract(config, "bfloat16")
        streams, limit = model.streams, config.max_positions
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    quantised = fields.integer("stored_bytes", 0, 0, 1 << 60)
    if tensors:
        count = sum(math.prod(tensor.shape) for tensor in tensors.values())
        if any(tensor.dtype not in STORED_DTYPES for tensor in tensors.values()):
            quantised = sum(map(stored_bytes, tensors.values()))
    name_of_dtype = dtype or choose_dtype(read_dtype(fields), tensors, fields.path, "bfloat16")
    is_published = quantised and dtype is None
    return Configuration(
        name=name,
        model_type=model_type,
        streams=streams,
        num_parameters=count,
        dtype=name_of_dtype,
        weight_bytes=quantised if is_published else count * ITEM_BYTES[name_of_dtype],
        position_limit=limit,
        has_model=model_type in BY_TYPE,
    )


def _tell_defaults(fields: Fields, config: ModelConfig) -> None:
    """Says which sizes config.json leaves to the defaults of its family."""
    for key, taken in (
        ("hidden_size", config.hidden_size),
        ("num_hidden_layers", config.num_layers),
    ):
        if fields.get(key) is None:
            log.warning(
                "%s: %s is missing; %d is taken, the default of %s",
                fields.path,
                key,
                taken,
                config.model_type,
            )


def _shared(width: int, tokens_per_entry: int = 1) -> EntryLayout:
    """One head whose value is its key."""
    return EntryLayout(
        num_kv_heads=1,
        key_dim=width,
        value_dim=width,
        value_in_key=True,
        tokens_per_entry=tokens_per_entry,
    )


def _read_deepseek_v4(fields: Fields) -> Streams:
    """Per layer a ring of the newest tokens, and in most layers one entry per 4 or 128 tokens.

    Where an entry stands for 4 tokens, another small one of an index stays on the device.
    """
    width = fields.integer("head_dim", None, 1, MAX_WIDTH)
    index = fields.integer("index_head_dim", None, 1, MAX_WIDTH)
    newest = fields.integer("sliding_window", None, 1, MAX_POSITIONS)
    num_layers = fields.integer("num_hidden_layers", None, 1, MAX_LAYERS)
    ratios = fields.get("compress_ratios")
    if (
        not isinstance(ratios, list)
        or len(ratios) < num_layers
        or any(ratio not in (0, 4, 128) for ratio in ratios)
    ):
        raise fields.refuse("compress_ratios", "0, 4 or 128 for each layer")
    ring = PlannedStream(_shared(width), kind=f"sliding({newest})")

    def layer(ratio: int) -> tuple[Stream, ...]:
        if ratio == 0:
            return (ring,)
        entries: tuple[Stream, ...] = (ring, Stream(_shared(width, ratio)))
        if ratio == 4:
            entries += (PlannedStream(_shared(index, ratio), kind="resident"),)
        return entries

    return tuple(map(layer, ratios[:num_layers]))


_OTHERS: Final[Mapping[Any, Callable[[Fields], Streams]]] = {
    "deepseek_v4": _read_deepseek_v4,
}
