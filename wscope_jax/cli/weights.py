"""Where the weights of `generate` and `score` come from: a checkpoint, or a seed."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wscope_jax.arguments import MOST_SEED, integer
from wscope_jax.cli import groups
from wscope_jax.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from wscope_jax.configurations import Configuration
    from wscope_jax.engine import Engine


@dataclasses.dataclass(frozen=True)
class Stored:
    """Weights of a checkpoint.

    Attributes:
        directory: Of the checkpoint.
        dtype: Of weights and cache, None for the checkpoint's.
        check_tensors: Look at every number.
    """

    directory: Path
    dtype: str | None
    check_tensors: bool

    def vocab_size(self) -> int:
        """How many ids the model has.

        Raises:
            CheckpointError: Anything about its configuration.
        """
        from wscope_jax import models

        return models.read_config(self.directory).vocab_size

    def describe(self) -> "Configuration":
        """The model as a plan sees it, by the checkpoint's headers.

        Raises:
            CheckpointError: Anything about its configuration and headers.
        """
        from wscope_jax import configurations

        return configurations.read(str(self.directory), self.dtype)

    def open(self, **settings: Any) -> "Engine":
        """An engine with these weights; settings and errors are those of `Engine.from_pretrained`."""
        from wscope_jax.engine import Engine

        return Engine.from_pretrained(
            self.directory, dtype=self.dtype, check_tensors=self.check_tensors, **settings
        )


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Weights that a seed makes.

    Attributes:
        config: Name or path of the configuration.
        dtype: Of weights and cache, None for the configuration's.
        seed: They are drawn by it.
    """

    config: str
    dtype: str | None
    seed: int

    def vocab_size(self) -> int:
        """As of `Stored`."""
        from wscope_jax import configurations

        return configurations.read_alone(self.config)[1].vocab_size

    def describe(self) -> "Configuration":
        """As of `Stored`."""
        from wscope_jax import configurations

        return configurations.read_alone(self.config, self.dtype)[0]

    def open(self, **settings: Any) -> "Engine":
        """As of `Stored`; the settings are those of `Engine`, too."""
        from wscope_jax import configurations, models
        from wscope_jax.engine import Engine

        described, config = configurations.read_alone(self.config, self.dtype)
        model = models.random(config, self.seed, described.dtype)
        return Engine(model, eos_ids=frozenset(config.eos_token_ids), **settings)


def of(arguments: argparse.Namespace) -> Stored | Drawn:
    """The weights that the options name; nothing is read, and jax is not imported.

    Raises:
        UsageError: If options do not go together, or the seed is none.
        CheckpointError: See `require_directory`.
    """
    if arguments.random_weights is None:
        require_directory(arguments.model)
        seed(arguments)
        return Stored(arguments.model, arguments.dtype, arguments.check_tensors)
    if arguments.check_tensors:
        raise UsageError(
            "--check-tensors: looks at a checkpoint, and --random-weights has none; leave it out"
        )
    return Drawn(arguments.random_weights, arguments.dtype, seed(arguments))


def seed(arguments: argparse.Namespace) -> int:
    """The seed that weights and prompts of random ids are drawn by.

    Raises:
        UsageError: If it is out of range.
    """
    return integer("seed", arguments.seed or 0, 0, MOST_SEED)


def require_directory(model: Path) -> None:
    """Refuses the name of a configuration that ships with the package where weights are needed.

    Raises:
        CheckpointError: If it is one, and no directory is called so.
    """
    if str(model) in groups.CONFIGURATIONS and not model.exists():
        raise CheckpointError(
            f"--model {model}: the name of a configuration without weights, for `wscope plan` and --random-weights; "
            "download the model's checkpoint and give its directory"
        )
