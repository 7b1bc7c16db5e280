"""The header pass: which safetensors files there are and which tensors they hold."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from wscope_jax.checkpoint.files import (
    Problems,
    locate,
    naming,
    parse_json,
    read_json,
    refuse_pointer,
    show,
    unreadable,
)
from wscope_jax.errors import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 64 << 20  # the index of 100,000 tensors has about 10 MB
OTHER_FORMATS: Final[Mapping[str, str]] = {
    ".bin": "PyTorch pickle",
    ".pt": "PyTorch pickle",
    ".pth": "PyTorch pickle",
    ".pkl": "pickle",
    ".ckpt": "pickle",
    ".gguf": "GGUF",
    ".h5": "Keras",
    ".msgpack": "Flax",
}
CONVERT: Final = (
    "convert it to safetensors where it came from, with "
    "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)` of transformers"
)

log = logging.getLogger("wscope_jax")


class Stored(NamedTuple):
    """A tensor as it lies in a file.

    Attributes:
        file: its safetensors file.
        dtype: its dtype in safetensors' spelling.
        shape: its dimensions.
        begin: byte of the file at which its numbers begin.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


def read_headers(root: Path) -> dict[str, Stored]:
    """Every tensor that the safetensors files in `root` hold, by name.

    Raises:
        CheckpointError: Anything is wrong with the files or their index; all that was found is in
            the one message.
    """
    problems = Problems(root)
    index = _read_index(root)
    headers: dict[str, dict[str, Stored]] = {}
    for path in _find_files(root, index, problems):
        try:
            headers[path.name] = _read_header(path)
        except CheckpointError as error:
            problems.add("unreadable files", str(error))
    tensors: dict[str, Stored] = {}
    for file, header in headers.items():
        for name, stored in header.items():
            if name in tensors:
                files = f"{tensors[name].file.name} and in {file}"
                problems.add("tensors stored twice", f"{show(name)} is in {files}")
            tensors[name] = stored
    for name, shard in index.items():
        if shard in headers and name not in headers[shard]:
            where = f", it is in {tensors[name].file.name}" if name in tensors else ""
            problems.add(
                "misplaced tensors", f"{show(name)} is not in {shard}, as {INDEX} has it{where}"
            )
    problems.check("fetch the checkpoint again")
    return tensors


def _read_index(root: Path) -> dict[str, str]:
    """Tensor name -> shard name; empty where there is no index, or a single file that wins."""
    path = locate(root, INDEX)
    if path is None or locate(root, SINGLE) is not None:
        return {}
    found = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{path}: weight_map is {show(found)}; expected an object of tensor name: file name"
        )
    for name, shard in found.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map puts {show(name)} into {show(shard)}; "
                "expected the name of a .safetensors file"
            )
    return found


def _find_files(root: Path, index: Mapping[str, str], problems: Problems) -> list[Path]:
    """The safetensors files to read; opens none."""
    with naming(root):
        present = {path.name for path in root.iterdir() if path.name.endswith(".safetensors")}
    wanted = sorted(set(index.values()) or present & {SINGLE} or present)
    refused = Problems(root)
    files = []
    for name in wanted:
        try:
            path = locate(root, name)
        except CheckpointError as error:
            refused.add("refused files", str(error))
            continue
        if path is None:
            problems.add("missing files", f"{show(name)} is missing")
        else:
            files.append(path)
    refused.check("a checkpoint that does this is not to be trusted")
    if not wanted:
        raise CheckpointError(_describe_without_safetensors(root))
    if ignored := sorted(present - set(wanted)):
        log.warning("%s: not part of the checkpoint, ignored: %s", root, ", ".join(ignored[:5]))
    return files


def _describe_without_safetensors(root: Path) -> str:
    with naming(root):
        names = sorted(path.name for path in root.iterdir())
    for name in names:
        for suffix, form in OTHER_FORMATS.items():
            if name.endswith(suffix):
                return f"{root}: only weights in another format ({show(name)}: {form}); {CONVERT}"
    what = "no .safetensors file" if names else "an empty directory"
    return f"{root}: {what}; a checkpoint has {SINGLE}, or {INDEX} and its shards"


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            refuse_pointer(path, head)
            if not head:
                raise CheckpointError(f"{path}: an empty file")
            with safe_open(path, framework="np"):  # checks sizes, offsets, dtypes and overlaps
                pass
            num_bytes = int.from_bytes(head[:8], "little")
            file.seek(8)
            header = parse_json(path, file.read(num_bytes))
    except OSError as error:
        raise unreadable(path, error) from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: broken or cut off ({error})") from None
    header.pop("__metadata__", None)
    return {name: _stored(path, 8 + num_bytes, entry) for name, entry in header.items()}


def _stored(path: Path, first: int, entry: Mapping[str, Any]) -> Stored:
    shape = tuple(int(dim) for dim in entry["shape"])
    return Stored(path, entry["dtype"], shape, first + int(entry["data_offsets"][0]))
