import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wscope_jax.errors import UsageError
from wscope_jax.sampling import Sampling, row_operands, sample

VOCAB = 37
NUM_DRAWS = 4_096
jitted = jax.jit(sample)


def logits_of(seed, batch, vocab=VOCAB):
    """Random logits that lie well apart, so that float32 and float64 cut at the same place."""
    rng = np.random.default_rng(seed)
    steps = rng.uniform(0.05, 0.4, size=(batch, vocab))
    return rng.permuted(np.cumsum(steps, axis=1), axis=1).astype(np.float32)


def support(logits, sampling):
    """Ids that may be drawn, and their probabilities, by the book and in float64."""
    order = np.argsort(-logits, kind="stable")
    weight = np.exp((logits[order].astype(np.float64) - logits.max()) / sampling.temperature)
    if sampling.top_k:
        order, weight = order[: sampling.top_k], weight[: sampling.top_k]
    if sampling.top_p < 1:
        reached = np.cumsum(weight) / weight.sum() >= sampling.top_p
        count = int(np.argmax(reached)) + 1
        order, weight = order[:count], weight[:count]
    is_kept = weight >= sampling.min_p
    order, weight = order[is_kept], weight[is_kept]
    return order, weight / weight.sum()


def draws(logits, sampling, seed=0):
    """NUM_DRAWS draws from one row's logits, each at its own position."""
    rows = row_operands([dataclasses.replace(sampling, seed=seed)] * NUM_DRAWS, [0] * NUM_DRAWS)
    tiled = jnp.broadcast_to(jnp.asarray(logits), (NUM_DRAWS, len(logits)))
    return np.asarray(jitted(tiled, rows, jnp.arange(NUM_DRAWS, dtype=jnp.int32)))


def run(logits, samplings, positions, row_ids=None):
    rows = row_operands(samplings, row_ids)
    return np.asarray(jitted(jnp.asarray(logits), rows, jnp.asarray(positions, jnp.int32)))


MIXED = [
    Sampling(temperature=0.0, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=3.0, top_k=9, seed=3),
    Sampling(temperature=2.0, top_p=0.8, seed=2**40 + 5),
    Sampling(temperature=5.0, top_k=20, top_p=0.9, min_p=0.3, seed=2**63 - 1),
]


class TestDistribution:
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(temperature=1.0),
            Sampling(temperature=3.0),
            Sampling(temperature=3.0, top_k=5),
            Sampling(temperature=3.0, top_p=0.7),
            Sampling(temperature=3.0, min_p=0.2),
            Sampling(temperature=3.0, top_k=12, top_p=0.6),
            Sampling(temperature=4.0, top_k=20, top_p=0.9, min_p=0.25),
            Sampling(temperature=4.0, top_k=VOCAB + 100),
        ],
        ids=str,
    )
    def test_support_and_frequencies(self, sampling):
        for seed in range(2):
            logits = logits_of(seed, 1)[0]
            ids, probability = support(logits, sampling)
            count = np.bincount(draws(logits, sampling, seed), minlength=VOCAB)
            assert count[ids].sum() == NUM_DRAWS
            expected = probability * NUM_DRAWS
            # Rare ids are counted as one, as the chi-square approximation asks.
            is_common = expected >= 5
            seen = np.append(count[ids][is_common], count[ids][~is_common].sum())
            wanted = np.append(expected[is_common], expected[~is_common].sum())
            seen, wanted = seen[wanted > 0], wanted[wanted > 0]
            chi_square = ((seen - wanted) ** 2 / wanted).sum()
            freedom = max(1, len(wanted) - 1)
            assert chi_square < freedom + 5 * math.sqrt(2 * freedom)

    @settings(deadline=None, max_examples=60)
    @given(
        st.integers(0, 2**32 - 1),
        st.integers(0, VOCAB + 3),
        st.floats(0.01, 1.0),
        st.floats(0.0, 1.0),
        st.floats(0.1, 10.0),
    )
    def test_any_settings_draw_from_their_support(self, seed, top_k, top_p, min_p, temperature):
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        logits = logits_of(seed, 64)
        drawn = run(logits, [sampling] * 64, np.arange(64))
        # Half a part in a million of room, for the rounding of float32 at the edge of a set.
        wider = dataclasses.replace(
            sampling, top_p=min(1.0, top_p + 1e-6), min_p=max(0.0, min_p - 1e-6)
        )
        for row, token in enumerate(drawn):
            assert token in support(logits[row], wider)[0]

    def test_without_filters_equals_the_softmax(self):
        logits = logits_of(3, 1)[0]
        with jax.enable_x64(True):
            probability = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float64)))
        frequency = np.bincount(draws(logits, Sampling(temperature=1.0)), minlength=VOCAB)
        assert np.abs(frequency / NUM_DRAWS - probability).max() < 0.03


class TestEdges:
    def test_greedy_takes_the_lowest_of_equals(self):
        logits = np.zeros((2, VOCAB), np.float32)
        logits[1, [30, 7, 12]] = 4.0
        assert run(logits, [Sampling()] * 2, [0, 0]).tolist() == [0, 7]

    def test_greedy_ignores_the_filters_and_the_seed(self):
        logits = logits_of(0, 4)
        samplings = [Sampling(seed=s, top_k=s, top_p=0.1 + 0.2 * s, min_p=1.0) for s in range(4)]
        assert (run(logits, samplings, [5, 6, 7, 8]) == logits.argmax(1)).all()

    @pytest.mark.parametrize(
        "one",
        [
            {"top_k": 1},
            {"top_p": 1e-9},
            {"top_p": 1e-45},
            {"temperature": 1e-6},
            {"temperature": 1e-38},
            {"temperature": 1e-42},
        ],
        ids=str,
    )
    def test_what_leaves_one_token_is_greedy(self, one):
        logits = logits_of(1, 64)
        logits[:8] = 0.0  # and of equals the first
        if "temperature" in one:
            logits = logits[8:]
        sampling = Sampling(**{"temperature": 1.0, **one})
        drawn = run(logits, [sampling] * len(logits), np.arange(len(logits)))
        assert (drawn == logits.argmax(1)).all()

    def test_min_p_of_one_keeps_equals(self):
        logits = np.zeros((64, VOCAB), np.float32)
        logits[:, [3, 9]] = 2.0
        drawn = run(logits, [Sampling(temperature=1.0, min_p=1.0)] * 64, np.arange(64))
        assert set(drawn) == {3, 9}

    def test_top_k_keeps_exactly_k_among_equals(self):
        drawn = draws(np.zeros(VOCAB, np.float32), Sampling(temperature=1.0, top_k=5))
        assert set(drawn) == {0, 1, 2, 3, 4}

    @pytest.mark.parametrize("sampling", [*MIXED, Sampling(temperature=100.0, min_p=0.0)], ids=str)
    def test_all_masked_but_one(self, sampling):
        logits = np.full((64, VOCAB), -np.inf, np.float32)
        logits[np.arange(64), np.arange(64) % VOCAB] = np.linspace(-1e30, 1e30, 64)
        drawn = run(logits, [sampling] * 64, np.arange(64))
        assert (drawn == np.arange(64) % VOCAB).all()

    @pytest.mark.parametrize("sampling", MIXED, ids=str)
    def test_masked_tokens_are_never_drawn(self, sampling):
        logits = logits_of(2, 64)
        logits[:, ::2] = -np.inf
        assert (run(logits, [sampling] * 64, np.arange(64)) % 2 == 1).all()

    def test_infinite_and_huge_logits(self):
        logits = np.zeros((3, VOCAB), np.float32)
        logits[0, 5] = np.inf
        logits[1, 6] = 3e38
        logits[2] = -3e38
        logits[2, 8] = 3e38
        drawn = run(logits, [Sampling(temperature=1.0, top_p=0.9)] * 3, [0, 0, 0])
        assert drawn.tolist() == [5, 6, 8]

    def test_no_nan_inside(self):
        logits = np.full((5, VOCAB), -np.inf, np.float32)
        logits[:, 11] = -3e38
        with jax.debug_nans(True):
            assert (run(logits, MIXED, [0] * 5) == 11).all()


class TestRows:
    @pytest.mark.parametrize("vocab", [VOCAB, 512, 1003])
    def test_a_row_alone_equals_the_row_in_a_batch(self, vocab):
        logits, positions = logits_of(4, 5, vocab), [9, 9, 800, 3, 0]
        together = run(logits, MIXED, positions)
        for row in range(5):
            alone = run(
                logits[row : row + 1], MIXED[row : row + 1], positions[row : row + 1], [row]
            )
            assert alone[0] == together[row]

    def test_kept_sets_are_bitwise_equal_in_any_batch(self):
        """A cut that falls exactly between two tokens must fall there in any batch."""
        logits = np.tile(logits_of(5, 1, 1003), (5, 1))
        for top_p in np.linspace(0.05, 0.95, 12):
            samplings = [Sampling(temperature=5.0, top_p=float(top_p))] * 5
            together = run(logits, samplings, [7] * 5, [3] * 5)
            assert len(set(together)) == 1
            assert run(logits[:1], samplings[:1], [7], [3])[0] == together[0]

    def test_permuted_rows_give_permuted_draws(self):
        logits, positions = logits_of(6, 5), np.array([4, 90, 2, 7, 1])
        straight = run(logits, MIXED, positions)
        order = np.array([3, 0, 4, 2, 1])
        permuted = run(logits[order], [MIXED[i] for i in order], positions[order], order.tolist())
        assert (permuted == straight[order]).all()

    def test_neighbours_do_not_matter(self):
        logits = logits_of(7, 5)
        straight = run(logits, MIXED, [1] * 5)
        for row in range(5):
            others = logits_of(100 + row, 5)
            others[row] = logits[row]
            samplings = [Sampling(temperature=2.0, seed=99 + i) for i in range(5)]
            samplings[row] = MIXED[row]
            positions = [50 + i for i in range(5)]
            positions[row] = 1
            assert run(others, samplings, positions)[row] == straight[row]

    def test_seed_row_and_position_each_change_the_draw(self):
        logits = np.zeros((40, VOCAB), np.float32)
        plain, at = Sampling(temperature=1.0), [0] * 40
        assert len(set(run(logits, [plain] * 40, range(40), at))) > 10
        assert len(set(run(logits, [plain] * 40, at, range(40)))) > 10
        seeds = [Sampling(temperature=1.0, seed=s << 32) for s in range(40)]
        assert len(set(run(logits, seeds, at, at))) > 10
        assert len(set(run(logits, [plain] * 40, at, at))) == 1

    @pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**40 + 5, 2**63 - 1])
    def test_key_is_that_of_the_seed(self, seed):
        with jax.enable_x64(True):
            key = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
        assert (row_operands([Sampling(temperature=1.0, seed=seed)]).key[0] == key).all()

    def test_draw_is_that_of_the_folded_key(self):
        """The rule by which anybody can reproduce a draw: rank of the largest score plus noise."""
        logits = logits_of(8, 1)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(42), 6), 1234)
        ranked = np.sort(logits[0])[::-1]
        rank = int(np.argmax(ranked + np.asarray(jax.random.gumbel(key, (VOCAB,)))))
        drawn = run(logits, [Sampling(temperature=1.0, seed=42)], [1234], [6])
        assert drawn[0] == np.argsort(-logits[0])[rank]

    def test_row_ids_must_fit_the_rows(self):
        with pytest.raises(UsageError, match="row_ids"):
            row_operands([Sampling()] * 2, [0])

    def test_operands_have_the_dtypes_of_the_step(self):
        dtypes = [str(leaf.dtype) for leaf in row_operands(MIXED)]
        assert dtypes == ["float32", "int32", "float32", "float32", "uint32", "int32"]


class TestProgram:
    def test_settings_do_not_recompile(self):
        num_traces = 0

        @jax.jit
        def step(logits, rows, positions):
            nonlocal num_traces
            num_traces += 1
            return sample(logits, rows, positions)

        for top_k in range(6):
            samplings = [Sampling(temperature=1.0 + top_k % 2, top_k=top_k, seed=top_k)] * 3
            step(jnp.zeros((3, VOCAB)), row_operands(samplings), jnp.zeros(3, jnp.int32))
        assert num_traces == 1

    @pytest.mark.parametrize("platform", ["cpu", "cuda"])
    def test_greedy_rows_alone_sort_nothing(self, platform):
        logits, positions = jnp.asarray(logits_of(64, 3)), jnp.zeros(3, jnp.int32)
        for samplings, sorts in (([Sampling()] * 3, False), (MIXED[:3], True)):
            arguments = (logits, row_operands(samplings), positions)
            text = jitted.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
            assert ("stablehlo.sort" in text) == sorts
        alone = run(logits, [Sampling()] * 3, positions)
        assert (alone == np.argmax(logits, axis=1)).all()
        assert alone[0] == run(logits, MIXED[:3], positions)[0]


class TestValidation:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_new_tokens", 0),
            ("max_new_tokens", -1),
            ("max_new_tokens", 2**31),
            ("max_new_tokens", 3.0),
            ("max_new_tokens", True),
            ("max_new_tokens", None),
            ("temperature", -0.1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("temperature", 101),
            ("temperature", True),
            ("temperature", "1"),
            ("top_k", -1),
            ("top_k", 2**31),
            ("top_k", 1.5),
            ("top_k", False),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("top_p", math.nan),
            ("top_p", True),
            ("min_p", -0.1),
            ("min_p", 1.01),
            ("min_p", math.nan),
            ("seed", -1),
            ("seed", 2**63),
            ("seed", 1.0),
            ("seed", True),
            ("stop", "END"),
            ("stop", ["END"]),
            ("stop", ("",)),
            ("stop", (1,)),
            ("stop", ("x" * 1025,)),
            ("stop", tuple(str(i) for i in range(1000))),
            ("ignore_eos", 1),
            ("ignore_eos", None),
        ],
    )
    def test_wrong_values_are_refused(self, field, value):
        with pytest.raises(UsageError, match=rf"^{field}: ") as caught:
            Sampling(**{field: value})
        message = str(caught.value)
        assert "\n" not in message
        assert "expected" in message

    @pytest.mark.parametrize(
        ("field", "value", "kept"),
        [
            ("max_new_tokens", np.int64(7), 7),
            ("temperature", 1, 1.0),
            ("temperature", np.float32(0.5), 0.5),
            ("top_p", 1, 1.0),
            ("seed", 2**63 - 1, 2**63 - 1),
            ("stop", ("\n", "END"), ("\n", "END")),
        ],
    )
    def test_values_at_the_edge_are_taken(self, field, value, kept):
        taken = getattr(Sampling(**{field: value}), field)
        assert taken == kept
        assert type(taken) is type(kept)

    def test_it_is_a_value(self):
        assert Sampling(seed=3) == Sampling(seed=3)
        assert hash(Sampling(seed=3)) == hash(Sampling(seed=3))
        with pytest.raises(dataclasses.FrozenInstanceError):
            Sampling().seed = 4
