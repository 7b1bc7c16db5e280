"""Between the parsed options and a running engine: environment, policy, sampling."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from wscope_jax import cores, machine
from wscope_jax.cli import groups, kept_programs, options, spelling, streams, weights
from wscope_jax.errors import MachineError
from wscope_jax.progress import SILENT, Progress
from wscope_jax.sizes import amount

if TYPE_CHECKING:
    from wscope_jax.configurations import Configuration
    from wscope_jax.engine import Engine
    from wscope_jax.memory_plan import Plan
    from wscope_jax.policies import Policy
    from wscope_jax.sampling import Sampling

log = logging.getLogger(__name__)

FREE: Final = "free memory on this machine"


class _OneLine(logging.Formatter):
    """`wscope: warning: ...`, as errors are shown."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname.lower()}: {spelling.spell(record.getMessage())}"
        return f"wscope: {streams.printable(line)}"


def prepare(threads: int | None = None, *, quiet: bool = False) -> None:
    """Sets what has to stand before jax starts; a variable that the user has set stays as it is.

    Args:
        threads: Workers the user asked for, None to choose.
        quiet: Show no warnings.
    """
    debug = options.is_debug()
    if not debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        warnings.simplefilter("ignore")  # those of the libraries; ours are logged
    if (cache := kept_programs.folder()) is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    if not machine.expects_gpu():
        # XLA's own pool keeps to the cores that the workers leave it: both compute at once.
        share = cores.split(cores.available(), threads=threads)
        os.environ.setdefault("NPROC", str(share.xla))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    level = logging.INFO if debug else logging.ERROR if quiet else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler])


def require_device() -> None:
    """Starts jax's backend.

    Raises:
        MachineError: If there is none for what JAX_PLATFORMS asks for, or JAX_DISABLE_JIT is set.
    """
    import jax

    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise MachineError(
            "JAX_DISABLE_JIT is set, but steps are programs that are compiled ahead; unset it"
        )
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion: a platform without its plugin
        asked = os.environ.get("JAX_PLATFORMS", "")
        text = " ".join(str(error).split()) or "no such device, or no jax plugin for it"
        raise MachineError(f"JAX_PLATFORMS={asked}: {text}; unset it, or set it to cpu") from error
    kept_programs.replace_broken()


def _warn_of_budgets(arguments: argparse.Namespace) -> None:
    """Says which budget exceeds what the machine has; it is taken as it is."""
    memory, gpus = machine.memory(), machine.gpus() if machine.expects_gpu() else []
    most = memory.total if memory.limit is None else min(memory.total, memory.limit)
    what = "this machine has" if most == memory.total else "this process may use"
    found = [("host", arguments.host_memory, most, what)]
    found += [("gpu", arguments.gpu_memory, gpu.total, f"the {gpu.name} has") for gpu in gpus[:1]]
    for name, budget, there, whose in found:
        if budget is not None and budget > there:
            log.warning(
                "--%s-memory %s: %s only %s; the run may slow down or be killed when that is full",
                name,
                amount(budget),
                whose,
                amount(there),
            )


def plan(
    arguments: argparse.Namespace,
    policy: "Policy",
    model: "Configuration",
    batch: int,
    max_len: int,
    gpu_memory: int | None,
) -> "Plan":
    """What a run with these options takes; `auto` is `resident` where the GPU holds the whole cache, as in a run.

    Args:
        arguments: The options of `plan`, `generate` or `score`.
        policy: That they choose, before a GPU is looked at.
        model: What is run.
        batch: Sequences.
        max_len: Tokens that each may reach.
        gpu_memory: What there is on the GPU, or None without one.
    """
    from wscope_jax import configurations, memory_plan, policies

    def of(policy: "Policy") -> "Plan":
        return memory_plan.plan(
            model.streams,
            policy=policy,
            batch=batch,
            max_len=max_len,
            window=arguments.window,
            itemsize=configurations.ITEM_BYTES[model.dtype],
            weights=model.weight_bytes,
            position_limit=model.position_limit,
            spare_memory=arguments.spare_memory,
            **machine.budgets(arguments.host_memory, gpu_memory)._asdict(),
        )

    if gpu_memory is not None and is_auto(arguments) and (whole := of(policies.Resident())).fits:
        return whole
    return of(policy)


def is_auto(arguments: argparse.Namespace) -> bool:
    """Whether the machine decides on the policy."""
    return arguments.policy == "auto" and arguments.cpu_share is None


def require_fit(arguments: argparse.Namespace, batch: int, max_len: int, *, shorter: str) -> None:
    """Refuses what cannot fit, by the checkpoint's headers alone, before its weights are read.

    Args:
        arguments: The options of `generate` or `score`.
        batch: Sequences.
        max_len: Tokens that each may reach, prompt and new ones.
        shorter: What to do where fewer tokens fit, with "{}" for their number.

    Raises:
        UsageError: If the options contradict each other.
        CheckpointError: Anything about the checkpoint's configuration and headers.
        CapacityError: If it does not fit.
    """
    from wscope_jax import devices, policies

    policy = policies.choose(arguments.policy, arguments.cpu_share)
    model = weights.of(arguments).describe()
    _warn_of_budgets(arguments)
    gpu = devices.memory_left()
    if gpu is not None and arguments.gpu_memory is not None:
        gpu = min(gpu, arguments.gpu_memory)
    plan(arguments, policy, model, batch, arguments.max_model_len or max_len, gpu).require_fit(
        shorter=shorter,
        fewer=f"take {{}} of the {batch} sequences",
        roomier="lower --spare-memory to {}",
        larger={
            "host": FREE if arguments.host_memory is None else "raise --host-memory",
            "gpu": _more_gpu_memory() if arguments.gpu_memory is None else "raise --gpu-memory",
            "machine": FREE,
        },
    )


def _more_gpu_memory() -> str:
    others = ", ".join(str(pid) for gpu in machine.gpus()[:1] for pid in gpu.others)
    holders = f" (process {others} holds some)" if others else ""
    return f"free GPU memory{holders}, or let jax have more (XLA_PYTHON_CLIENT_MEM_FRACTION)"


def open_engine(arguments: argparse.Namespace, progress: Progress = SILENT) -> "Engine":
    """Loads the checkpoint behind the options of `generate` and `score`, or draws its weights.

    Raises:
        UsageError: If the options contradict each other.
        CheckpointError: Anything about the checkpoint.
        CapacityError: If it does not fit.
        MachineError: If the machine lacks what was asked for.
    """
    from wscope_jax import policies

    policy = policies.choose(arguments.policy, arguments.cpu_share)
    require_device()
    kept_programs.warn()
    return weights.of(arguments).open(
        policy="auto" if is_auto(arguments) else policy,
        window=arguments.window,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        spare_memory=arguments.spare_memory,
        threads=arguments.threads,
        progress=progress,
    )


def make_sampling(
    arguments: argparse.Namespace, settings: Mapping[str, Any] | None = None
) -> "Sampling":
    """The sampling that the options ask for; what they leave out has Sampling's own default.

    Args:
        arguments: The options.
        settings: Fields of Sampling that stand above the options.

    Raises:
        UsageError: If a value is outside its range.
    """
    from wscope_jax.sampling import Sampling

    given = {name: getattr(arguments, name) for name in groups.SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    given["stop"] = tuple(arguments.stop or ())
    return Sampling(**{**given, **(settings or {})})
