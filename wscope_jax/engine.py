"""Engine: a checkpoint, a policy and the machine, made ready to generate text from long prompts."""

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wscope_jax import devices, forced, forks, policies, settings
from wscope_jax.arguments import boolean, integer
from wscope_jax.caches import Caches
from wscope_jax.calls import Call
from wscope_jax.checkpoint import require_path
from wscope_jax.dispatcher import start_workers
from wscope_jax.errors import UsageError
from wscope_jax.generation import Generation
from wscope_jax.models import registry
from wscope_jax.policies import Policy, Resident
from wscope_jax.programs import ModelPrograms
from wscope_jax.progress import SILENT, Progress
from wscope_jax.rows import Result
from wscope_jax.sampling import Sampling
from wscope_jax.sizes import amount
from wscope_jax.token_ids import Prompt, id_array, prompt_ids
from wscope_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Float32s = npt.NDArray[np.float32]


class Engine:
    """Generates from a model whose KV cache lives in four regions.

    Each call has a cache of its own, so calls may come from several threads; they share the workers, and what
    `Result.compiles` counts. What a call of `generate` measures of CPU and link is where the next one begins. Use it as
    a context manager, or `close` it. It cannot be used in a forked child.

    Args:
        model: see `models`.
        policy: a name (see `policies.BY_NAME`, or "auto") or a policy.
        window: D, one of 32, 64, 128, 256, 512.
        gpu_memory: bytes that weights and cache may take on the GPU; None = what JAX has there. Not used without one.
        host_memory: bytes for the host regions; None = as many as a call needs.
        spare_memory: bytes of GPU memory that the windows of a call may take beyond D. What they keep is neither
            streamed nor read by the CPU.
        threads: CPU workers; None = what suits this machine.
        eos_ids: ids that end a sequence.
        tokenizer: for prompts that are text; None = token ids only.
        progress: told how far prefills are.

    Raises:
        UsageError: an impossible argument.
        MachineError: not one worker could be started, or this process is a forked child.
    """

    def __init__(
        self,
        model: Any,
        *,
        policy: str | Policy = "auto",
        window: int = 256,
        gpu_memory: int | None = None,
        host_memory: int | None = None,
        spare_memory: int = 0,
        threads: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        progress: Progress = SILENT,
    ) -> None:
        forks.mark_started()
        chosen = settings.check(policy, window, threads, progress)
        settings.check_memory(gpu_memory, host_memory, spare_memory)
        settings.check_model(model, tokenizer)
        self.model = model
        self.window = window
        self.tokenizer = tokenizer
        self.eos_ids = settings.end_ids(eos_ids)
        self.progress = progress
        self._is_closed = False
        self._programs = ModelPrograms(model)
        if gpu_memory is not None:
            gpu_memory = max(0, gpu_memory - self._programs.weight_bytes)
        start_workers(devices.num_workers(threads))
        self._caches = Caches(
            model,
            chosen,
            is_auto=policy == "auto",
            window=window,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            spare_memory=spare_memory,
        )
        self.dtype = self._caches.dtype

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        policy: str | Policy = "auto",
        window: int = 256,
        dtype: str | None = None,
        gpu_memory: int | None = None,
        host_memory: int | None = None,
        spare_memory: int = 0,
        threads: int | None = None,
        progress: Progress = SILENT,
        check_tensors: bool = False,
    ) -> "Engine":
        """Reads a published checkpoint: config.json, *.safetensors and, if there is one, tokenizer.json.

        Args:
            directory: the checkpoint.
            policy: see the class.
            window: see the class.
            dtype: "float32" or "bfloat16" for weights, activations and cache; None = the checkpoint's.
            gpu_memory: budget on the device in bytes; not used on a machine without a GPU.
            host_memory: see the class.
            spare_memory: see the class.
            threads: see the class.
            progress: told how far loading is, and later how far prefills are.
            check_tensors: look at every number for NaN and infinity, not at a sample of each tensor.

        Raises:
            CheckpointError: anything wrong with the checkpoint.
            CapacityError: the weights do not fit.
            UsageError: an impossible argument.
            MachineError: see the class.
        """
        forks.mark_started()
        require_path("directory", directory)
        # Before the weights are read.
        settings.check(policy, window, threads, progress)
        settings.check_memory(gpu_memory, host_memory, spare_memory)
        boolean("check_tensors", check_tensors)
        if gpu_memory is not None and devices.current().platform == "cpu":
            log.warning(
                "gpu_memory: there is no GPU here; the budget of %s is not used", amount(gpu_memory)
            )
        config = registry.read_config(directory)
        tokenizer = Tokenizer.from_dir(
            directory, config.vocab_size
        )  # before the weights: it is small
        model = registry.load(directory, dtype, report=progress.loading, check_all=check_tensors)
        return cls(
            model,
            policy=policy,
            window=window,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            spare_memory=spare_memory,
            threads=threads,
            eos_ids=frozenset(config.eos_token_ids),
            tokenizer=tokenizer,
            progress=progress,
        )

    @property
    def policy(self) -> Policy:
        """What the next call that names none begins with."""
        return self._caches.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._caches.policy = policies.require(policy)

    # --- text -------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_model_len: int | None = None,
        policy: Policy | None = None,
    ) -> Generation:
        """Starts to generate; iterate over the events, or `close` what is returned.

        Args:
            prompts: texts or lists of token ids, one per row; lengths may differ.
            sampling: settings for all rows, or one per row.
            max_model_len: tokens that a row may hold; None = longest prompt + new tokens.
            policy: for this call; None = the engine's.

        Raises:
            UsageError: an empty prompt, an id or a setting out of range, text without a tokenizer, a closed engine.
            CapacityError: the host regions cannot hold `max_model_len` tokens of each row.
        """
        self._check_open()
        call = Call.of(
            prompts,
            sampling,
            max_model_len,
            vocab_size=self.model.vocab_size,
            tokenizer=self.tokenizer,
        )
        self._warn_of_positions(call.max_len)
        used = self._caches.choose(len(call.ids), call.max_len) if policy is None else policy
        return Generation(
            self._programs,
            self._caches.make(len(call.ids), call.max_len, used),
            call,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
            progress=self.progress,
            learned=functools.partial(self._caches.learn, used),
            check_open=self._check_open,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_model_len: int | None = None,
        policy: Policy | None = None,
    ) -> Result:
        """Generates to the end and returns all of it; arguments as for `stream`."""
        generation = self.stream(prompts, sampling, max_model_len=max_model_len, policy=policy)
        try:
            for _ in generation:
                pass
        finally:
            generation.close()
        return generation.result

    # --- logits -----------------------------------------------------------------------------------------------------

    def score(
        self,
        ids: Any,
        prefill: int,
        *,
        max_model_len: int | None = None,
        policy: Policy | None = None,
    ) -> Float32s:
        """Logits of forced texts: prefills ids[..., :prefill] and decodes the rest token by token.

        Args:
            ids: integers [T] or [B, T].
            prefill: P, 1 to T.
            max_model_len: tokens that a row may hold; None = T.
            policy: for this call; None = the engine's.

        Returns:
            Float32 [T - P + 1, vocabulary], or [B, T - P + 1, vocabulary]: of positions P - 1 to T - 1.
        """
        self._check_open()
        ids_BT = id_array(ids, self.model.vocab_size)
        batch, num_tokens = ids_BT.shape
        prefill = integer("prefill", prefill, 1, num_tokens)
        max_len = integer(
            "max_model_len", num_tokens if max_model_len is None else max_model_len, 1
        )
        if num_tokens > max_len:
            raise UsageError(
                f"tokens: {num_tokens} tokens exceed max_model_len={max_len}; give fewer or raise it"
            )
        self._warn_of_positions(num_tokens)
        with self._caches.make(batch, max_len, policy) as cache:
            out = forced.score(self._programs, cache, ids_BT, prefill, self.progress)
        return out if np.ndim(ids) == 2 else out[0]

    def logits(self, ids: Any) -> Float32s:
        """Logits of every position, by the prefill path: float32 [B, T, vocabulary] of integers [B, T]."""
        self._check_open()
        ids_BT = id_array(ids, self.model.vocab_size)
        out = []
        for row in ids_BT:
            with self._caches.make(1, len(row), policy=Resident()) as cache:
                out.append(forced.read(self._programs, cache, row.tolist()))
        return np.stack(out)

    def find_broken(self, ids: Sequence[int]) -> str | None:
        """Where numbers stop being finite as the model reads `ids`: "the embedding", "layer 3", "the head"."""
        self._check_open()
        (row,) = prompt_ids([ids], self.model.vocab_size, self.tokenizer)
        with self._caches.make(1, len(row), policy=Resident()) as cache:
            return forced.find_broken(self._programs, cache, row)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _warn_of_positions(self, max_len: int) -> None:
        limit = self.model.config.max_positions
        if limit is not None and max_len > limit:
            log.warning(
                "%d tokens exceed the %d positions that the model was made for; text beyond may degrade",
                max_len,
                limit,
            )

    def _check_open(self) -> None:
        forks.check("engine")
        if self._is_closed:
            raise UsageError("engine: it was closed; make a new one")

    def close(self) -> None:
        """Stops what the engine started; compiled programs are dropped with it. A second call does nothing.

        A stream under way ends: its next event is a UsageError, and its cache is freed with that.
        """
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        if self._is_closed or forks.is_child():
            return
        self._is_closed = True
        self._caches.compiled.close(wait=wait)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An interruption does not wait for what is being compiled ahead.
        self._close(wait=kind is None or issubclass(kind, Exception))
