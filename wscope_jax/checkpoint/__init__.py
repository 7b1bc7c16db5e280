"""Reads a checkpoint directory: first all headers, then each tensor once, straight to its final place.

Nothing in a checkpoint is executed and no pickle is ever opened. Every fault is a `CheckpointError`; whatever can be
known from the headers is reported at once, before any memory is taken.
"""

from wscope_jax.checkpoint.files import locate as locate
from wscope_jax.checkpoint.files import naming as naming
from wscope_jax.checkpoint.files import open_directory as open_directory
from wscope_jax.checkpoint.files import read_bytes as read_bytes
from wscope_jax.checkpoint.files import read_json as read_json
from wscope_jax.checkpoint.files import require_path as require_path
from wscope_jax.checkpoint.files import show as show
from wscope_jax.checkpoint.files import unreadable as unreadable
from wscope_jax.checkpoint.headers import Stored as Stored
from wscope_jax.checkpoint.tensors import Checkpoint as Checkpoint
from wscope_jax.checkpoint.tensors import Match as Match
from wscope_jax.checkpoint.tensors import Piece as Piece
from wscope_jax.checkpoint.tensors import Place as Place
