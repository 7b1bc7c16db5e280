"""What the demo model learns from: pieces of prose with planted notes and their questions, answered.

Batches are drawn by processes of their own, ahead of the training. Batch i depends on the seed and on i alone, however
many processes there are.
"""

import collections
import concurrent.futures
import multiprocessing
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from wscope_jax.demo_text import KEYS, NUM_DIGITS, note_line, question

# What a byte is as something to be predicted.
IGNORED: Final = 0  # notes and questions: a model that learned to predict them would write its own
PROSE: Final = 1
DIGIT: Final = 2  # of an answer
PAIR_BYTES: Final = 74  # of a note and its question, answered
MAX_PAIRS: Final = 48
MAX_PAIRS_SHARE: Final = 0.6  # of a sequence
PLAIN_SHARE: Final = 0.15  # sequences that are only prose
EXAM_SHARE: Final = 0.5  # sequences that ask everything in their last part
EXAM_PART: Final = 0.15  # that part
TIMES_ASKED: Final = (0.15, 0.75, 0.10)  # probabilities that a note is asked for 0, 1, 2 times


class Batch(NamedTuple):
    """Sequences and the kinds of their bytes, both uint8 [B, T + 1]."""

    ids: np.ndarray
    kinds: np.ndarray


class Sampler:
    """Draws sequences from a text."""

    def __init__(self, text: str, seed: int) -> None:
        self.bytes = np.frombuffer(text.encode("ascii"), np.uint8)
        self.line_starts = np.concatenate([[0], np.flatnonzero(self.bytes == ord("\n")) + 1])
        words = set(re.findall(r"\b[a-z]{4,9}\b", text))
        self.words = sorted(words - set(KEYS))
        self.seed = seed

    def batch(self, index: int, num: int, length: int) -> Batch:
        """Batch `index`, of `num` sequences with `length` bytes to predict."""
        rng = np.random.default_rng((self.seed, index, length))
        ids, kinds = zip(*(self._sequence(rng, length + 1) for _ in range(num)), strict=True)
        return Batch(np.stack(ids), np.stack(kinds))

    def _sequence(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        items = [] if rng.random() < PLAIN_SHARE else self._items(rng, size)
        num_prose = size - sum(line.size for _, line, _ in items)
        start = self._line_start(rng.integers(self.bytes.size - num_prose))
        ids, kinds, done = [], [], start
        for depth, line, line_kinds in items:
            end = max(done, self._line_start(start + int(depth * num_prose)))
            ids += [self.bytes[done:end], line]
            kinds += [np.full(end - done, PROSE, np.uint8), line_kinds]
            done = end
        rest = start + num_prose - done
        ids.append(self.bytes[done : done + rest])
        kinds.append(np.full(rest, PROSE, np.uint8))
        return np.concatenate(ids), np.concatenate(kinds)

    def _items(
        self, rng: np.random.Generator, size: int
    ) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """Depth, bytes and kinds of each note and each answered question, by depth."""
        most = min(MAX_PAIRS, int(MAX_PAIRS_SHARE * size / PAIR_BYTES))
        keys = {self._key(rng) for _ in range(rng.integers(min(2, most), most + 1))}
        is_exam = rng.random() < EXAM_SHARE
        items = []
        for key in sorted(keys):
            value = "".join(map(str, rng.integers(0, 10, NUM_DIGITS)))
            line = np.frombuffer(note_line(key, value).encode(), np.uint8)
            depth = rng.random() * (1 - EXAM_PART if is_exam else 1)
            items.append((depth, line, np.full(line.size, IGNORED, np.uint8)))
            first = 1 - EXAM_PART if is_exam else depth
            stem = question(key)
            line = np.frombuffer(f"{stem}{value}]\n".encode(), np.uint8)
            kinds = np.full(line.size, PROSE, np.uint8)
            kinds[: len(stem)] = IGNORED
            kinds[len(stem) : len(stem) + NUM_DIGITS] = DIGIT
            times = rng.random(rng.choice(3, p=TIMES_ASKED))
            items += [(first + time * (1 - first), line, kinds) for time in times]
        return sorted(items, key=lambda item: item[0])

    def _key(self, rng: np.random.Generator) -> str:
        """A word of the text, or letters at random."""
        if rng.random() < 0.5:
            return self.words[rng.integers(len(self.words))]
        letters = rng.integers(ord("a"), ord("z") + 1, rng.integers(4, 9))
        return letters.astype(np.uint8).tobytes().decode()

    def _line_start(self, at: int) -> int:
        """Where the line of a byte begins."""
        return int(self.line_starts[np.searchsorted(self.line_starts, at, "right") - 1])


def start(sampler: Sampler, num_processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that draw from a sampler."""
    # A forked child of a process with XLA's threads may hang.
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(num_processes, context, _keep, (sampler,))


def stream(
    pool: concurrent.futures.ProcessPoolExecutor, num: int, length: int, num_queued: int
) -> Iterator[Batch]:
    """Batches 0, 1, 2 ... without end, `num_queued` of them drawn ahead."""
    queue: collections.deque[concurrent.futures.Future[Batch]] = collections.deque()
    index = 0
    try:
        while True:
            while len(queue) < num_queued:
                queue.append(pool.submit(_draw, index, num, length))
                index += 1
            yield queue.popleft().result()
    finally:
        for future in queue:
            future.cancel()


_sampler: Sampler


def _keep(sampler: Sampler) -> None:
    global _sampler
    _sampler = sampler


def _draw(index: int, num: int, length: int) -> Batch:
    return _sampler.batch(index, num, length)
