"""The tensor pass: each tensor is read once, by position, into the array that becomes the parameter.

Reading by position instead of through a memory map makes a file that shrinks meanwhile an error, not a bus error.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import ml_dtypes
import numpy as np

from wscope_jax.arguments import boolean, shown
from wscope_jax.checkpoint.files import Problems, open_directory, show, unreadable
from wscope_jax.checkpoint.headers import Stored, read_headers
from wscope_jax.errors import CapacityError, CheckpointError, UsageError, is_out_of_memory
from wscope_jax.sizes import amount

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
SAMPLED: Final = 1024  # numbers of a piece that are looked at for NaN and infinity
CHUNK: Final = 1 << 22  # numbers converted at a time when the stored dtype is another
READ_BYTES: Final = 64 << 20  # read at a time: between two reads Ctrl-C is noticed
ALIGNMENT: Final = 64  # bytes; JAX takes a host array aligned so as a CPU array without copying it
IGNORED: Final = re.compile(r"\.rotary_emb\.inv_freq$")  # a table that old checkpoints carry along


class Piece(NamedTuple):
    """A run of consecutive numbers of one stored tensor.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: shape that the whole stored tensor must have.
        start: first number of the run, in row-major order.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0


class Place(NamedTuple):
    """A parameter and the ways in which a checkpoint may store it.

    Attributes:
        key: path of the parameter in the caller's state.
        shape: its shape.
        options: ways to read it, the published one first. The pieces of an option fill the parameter in order, in
            equal parts.
    """

    key: tuple[Any, ...]
    shape: tuple[int, ...]
    options: Sequence[Sequence[Piece]]


class Match(NamedTuple):
    """How the tensors of a checkpoint fill the places that they are for; whole if the other lists are empty.

    Attributes:
        pieces: what fills each place, in the order of the places.
        missing: pieces of tensors that are not stored; one piece of each tensor, here and below.
        misshapen: pieces of tensors that are stored in another shape.
        unreadable: pieces of tensors that are stored in a dtype that is not read.
        unexpected: names of tensors that no place is for.
    """

    pieces: list[Sequence[Piece]]
    missing: list[Piece]
    misshapen: list[Piece]
    unreadable: list[Piece]
    unexpected: list[str]


class Checkpoint:
    """The tensors of a checkpoint directory; creating it reads all headers and nothing else.

    Attributes:
        directory: its folder.
        tensors: every stored tensor by name.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Reads the headers.

        Raises:
            CheckpointError: See `read_headers`.
        """
        self.directory: Path = open_directory(directory)
        self.tensors: Mapping[str, Stored] = read_headers(self.directory)

    def match(self, places: Sequence[Place]) -> Match:
        """How the stored tensors fill these places; of each the first option whose first tensor is stored."""
        match = Match([], [], [], [], [])
        used: set[str] = set()
        for place in places:
            stored_ones = (way for way in place.options if way[0].name in self.tensors)
            pieces = next(stored_ones, place.options[0])
            match.pieces.append(pieces)
            for piece in pieces:
                if piece.name not in used:
                    self._note(piece, match)
                used.add(piece.name)
        match.unexpected.extend(
            name for name in self.tensors if name not in used and not IGNORED.search(name)
        )
        return match

    def _note(self, piece: Piece, match: Match) -> None:
        stored = self.tensors.get(piece.name)
        if stored is None:
            match.missing.append(piece)
            return
        if stored.shape != piece.shape:
            match.misshapen.append(piece)
        if stored.dtype not in DTYPES:
            match.unreadable.append(piece)

    def require_whole(self, places: Sequence[Place]) -> Match:
        """How the stored tensors fill these places, which they do exactly.

        Raises:
            CheckpointError: They do not; all that is wrong is in the one message.
        """
        match = self.match(places)
        problems = Problems(self.directory)
        for piece in match.missing:
            problems.add("missing tensors", f"{show(piece.name)} {list(piece.shape)} is missing")
        for piece in match.misshapen:
            found = show(list(self.tensors[piece.name].shape))
            text = f"{self._where(piece.name)} has shape {found}, expected {list(piece.shape)}"
            problems.add("tensors of a wrong shape", text)
        for piece in match.unreadable:
            found, known = self.tensors[piece.name].dtype, ", ".join(DTYPES)
            text = f"{self._where(piece.name)} is {found}, expected one of {known}"
            problems.add("tensors of a wrong dtype", text)
        for name in match.unexpected:
            problems.add("unexpected tensors", f"{self._where(name)} is not expected")
        problems.check("its files and its config.json do not belong together")
        return match

    def _where(self, name: str) -> str:
        return f"{show(name)} in {self.tensors[name].file.name}"

    def load(
        self,
        places: Sequence[Place],
        dtype: np.dtype[Any],
        *,
        report: Callable[[int, int], None] | None = None,
        check_all: bool = False,
    ) -> Iterator[tuple[tuple[Any, ...], jax.Array]]:
        """Yields each place's key and array, on the default device and of dtype `dtype`.

        At most one parameter is in host memory beside those that JAX holds.

        Args:
            places: what to read.
            dtype: of all arrays.
            report: told how many bytes are read, and of how many, after each piece.
            check_all: look at every number for NaN and infinity, not at a sample of each piece.

        Raises:
            UsageError: `report` is no function, or `check_all` not True or False.
            CapacityError: There is no memory for a parameter.
            CheckpointError: Tensors are missing, unexpected, of a wrong shape or of a dtype that cannot
                be read: all are in the one message, and nothing was read. Or a file cannot be read
                to its end, or holds NaN or infinity where it was sampled.
        """
        boolean("check_all", check_all)
        if not (report is None or callable(report)):
            raise UsageError(f"report: expected a function of two numbers, got {shown(report)}")
        match = self.require_whole(places)
        total = sum(math.prod(place.shape) for place in places) * dtype.itemsize
        done = 0
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            for place, pieces in zip(places, match.pieces, strict=True):
                with _naming(place, dtype):
                    array = empty_aligned(place.shape, dtype)
                parts = np.split(array.reshape(-1), len(pieces))
                for piece, out in zip(pieces, parts, strict=True):
                    stored = self.tensors[piece.name]
                    if stored.file not in files:
                        files[stored.file] = _open(stored.file)
                        stack.callback(os.close, files[stored.file])
                    _read(files[stored.file], stored, piece, out, check_all=check_all)
                    done += out.nbytes
                    if report is not None:
                        report(done, total)
                with _naming(place, dtype):
                    placed = jax.device_put(array).block_until_ready()
                yield place.key, placed


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised host array that begins at a multiple of `ALIGNMENT` bytes."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + num_bytes].view(dtype).reshape(shape)


@contextmanager
def _naming(place: Place, dtype: np.dtype[Any]) -> Iterator[None]:
    """Says what there was no memory for."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        name = ".".join(map(str, place.key))
        num_bytes = math.prod(place.shape) * dtype.itemsize
        raise CapacityError(
            f"weights: no memory for {name}, {amount(num_bytes)} of {dtype}; free some, or choose dtype bfloat16"
        ) from error


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from None


def _read(
    file: int, stored: Stored, piece: Piece, out: np.ndarray[Any, Any], *, check_all: bool
) -> None:
    """Fills `out` (one dimension) with the numbers of `piece`, converted to its dtype."""
    dtype = DTYPES[stored.dtype]
    begin = stored.begin + piece.start * dtype.itemsize
    if dtype == out.dtype:
        _read_bytes(file, stored, begin, out)
    else:
        for first in range(0, out.size, CHUNK):
            part = out[first : first + CHUNK]
            numbers = np.empty(part.size, dtype)
            _read_bytes(file, stored, begin + first * dtype.itemsize, numbers)
            part[...] = numbers.astype(part.dtype)
    stride = 1 if check_all else max(1, out.size // SAMPLED)
    for first in range(0, out.size, CHUNK * stride):
        sample = out[first : first + CHUNK * stride : stride].astype(np.float32)
        if not np.isfinite(sample).all():
            raise CheckpointError(
                f"{stored.file}: {show(piece.name)} holds NaN or infinity; fetch the file again"
            )


def _read_bytes(file: int, stored: Stored, begin: int, out: np.ndarray[Any, Any]) -> None:
    view = out.view(np.uint8).data
    done = 0
    while done < len(view):
        try:
            num = os.preadv(file, [view[done : done + READ_BYTES]], begin + done)
        except OSError as error:
            raise unreadable(stored.file, error) from None
        if num == 0:
            raise CheckpointError(
                f"{stored.file}: became shorter while it was read; fetch the file again"
            )
        done += num
