import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wscope_jax.errors import UsageError
from wscope_jax.roofline import MOST_CHANGE, Roofline, StepTiming

LAYERS = 48
NS = 1e9
costs = st.floats(1e-12, 1.0)
fixed = st.floats(0.0, 1.0)
rooflines = st.builds(
    Roofline, cpu_s_per_entry=costs, link_s_per_entry=costs, cpu_fixed_s=fixed, link_fixed_s=fixed
)
lengths = st.integers(0, 10**9)
absurd_timings = st.builds(
    StepTiming,
    cpu_ns=st.floats(),
    link_ns=st.floats(),
    link_idle_ns=st.floats(),
    wait_cpu_ns=st.floats(),
    wait_link_ns=st.floats(),
    host_entries=st.integers(),
    streamed_entries=st.integers(),
    jobs=st.integers(-1, 100),
)
sane_timings = st.builds(
    StepTiming,
    cpu_ns=st.floats(1e3, 1e10),
    link_ns=st.floats(1e3, 1e10),
    link_idle_ns=st.floats(0, 1e10),
    wait_cpu_ns=st.floats(0, 1e10),
    wait_link_ns=st.floats(0, 1e10),
    host_entries=st.integers(0, 10**8),
    streamed_entries=st.integers(0, 10**8),
    jobs=st.integers(1, 100),
)


@dataclasses.dataclass
class Machine:
    """What a machine with known costs would report."""

    cpu: float = 40e-9
    link: float = 60e-9
    cpu_fixed: float = 0.0
    link_fixed: float = 0.0
    unseen_link: float = 0.0  # seconds a job beyond what the link reports
    ahead: float = 0.0  # seconds of copies that the link makes ahead if the CPU leaves it time
    others: float = 0.0  # seconds a job in which the link stands still for something else
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def step(self, host_entries, streamed_entries):
        """A step in which each layer attends to so many entries."""

        def noisy(seconds):
            return LAYERS * NS * seconds * (1 + self.random.uniform(-self.noise, self.noise))

        cpu_ns = noisy(self.cpu * host_entries + self.cpu_fixed) if host_entries else 0
        link_ns = noisy(self.link * streamed_entries + self.link_fixed) if streamed_entries else 0
        late_ns = cpu_ns - link_ns - LAYERS * NS * self.unseen_link
        ahead_ns = LAYERS * NS * self.ahead if late_ns > 0 else 0
        return StepTiming(
            cpu_ns=cpu_ns,
            link_ns=link_ns,
            link_idle_ns=max(0.0, late_ns) + LAYERS * NS * self.others,
            wait_cpu_ns=max(0.0, late_ns + ahead_ns),
            wait_link_ns=max(0.0, -late_ns),
            host_entries=LAYERS * host_entries,
            streamed_entries=LAYERS * streamed_entries,
            jobs=LAYERS,
        )


def follow(roofline, machine, num_placed, steps):
    """The shares of steps whose entries always lie as the share wants them."""
    shares = []
    for _ in range(steps):
        share = roofline.cpu_share(num_placed)
        shares.append(share)
        host = round(share * num_placed)
        roofline = roofline.observe(machine.step(host, num_placed - host))
    return roofline, shares


def place(roofline, machine, steps, blocks, every, block=256):
    """The shares of steps in which only newly placed blocks, one in `every` steps, can follow."""
    unpinned, placed = blocks
    shares = []
    for step in range(steps):
        if step % every == 0:
            unpinned += unpinned < roofline.cpu_share((placed + 1) * block) * (placed + 1)
            placed += 1
        timing = machine.step(unpinned * block, (placed - unpinned) * block)
        roofline = roofline.observe(timing)
        shares.append(roofline.cpu_share(placed * block))
    return roofline, shares, (unpinned, placed)


class TestEquations:
    @pytest.mark.parametrize(
        ("num_placed", "share"),
        [
            (1_000, 1.0),  # 0.75 + 2.5, clamped
            (10_000, 1.0),  # 0.75 + 0.25
            (20_000, 0.875),
            (100_000, 0.775),
            (10**9, 0.7500025),
        ],
    )
    def test_share_when_the_link_starts_later(self, num_placed, share):
        roofline = Roofline(
            cpu_s_per_entry=2e-8, link_s_per_entry=6e-8, cpu_fixed_s=1e-4, link_fixed_s=3e-4
        )
        assert roofline.cpu_share(num_placed) == pytest.approx(share, rel=1e-9)

    @pytest.mark.parametrize(
        ("num_placed", "share"), [(2_000, 0.0), (3_000, 0.0), (10_000, 0.5), (100_000, 0.725)]
    )
    def test_share_when_the_cpu_starts_later(self, num_placed, share):
        roofline = Roofline(
            cpu_s_per_entry=2e-8, link_s_per_entry=6e-8, cpu_fixed_s=3e-4, link_fixed_s=1e-4
        )
        assert roofline.cpu_share(num_placed) == pytest.approx(share, rel=1e-9)

    def test_times(self):
        roofline = Roofline(
            cpu_s_per_entry=2e-8, link_s_per_entry=6e-8, cpu_fixed_s=1e-4, link_fixed_s=3e-4
        )
        assert roofline.cpu_time(0.25, 40_000) == pytest.approx(3e-4)
        assert roofline.link_time(0.25, 40_000) == pytest.approx(2.1e-3)

    @pytest.mark.parametrize(
        ("cpu_fixed", "link_fixed", "share"), [(0.0, 0.0, 0.75), (1e-6, 0.0, 0.0), (0.0, 1e-6, 1.0)]
    )
    def test_nothing_placed(self, cpu_fixed, link_fixed, share):
        roofline = Roofline(
            cpu_s_per_entry=1.0,
            link_s_per_entry=3.0,
            cpu_fixed_s=cpu_fixed,
            link_fixed_s=link_fixed,
        )
        assert roofline.cpu_share(0) == share

    @given(rooflines, lengths)
    def test_both_sides_take_equally_long(self, roofline, num_placed):
        share = roofline.cpu_share(num_placed)
        assert 0.0 <= share <= 1.0
        cpu, link = roofline.cpu_time(share, num_placed), roofline.link_time(share, num_placed)
        tolerance = 1e-9 * (roofline.cpu_time(1, num_placed) + roofline.link_time(0, num_placed))
        if share == 0:
            assert cpu >= link - tolerance
        elif share == 1:
            assert cpu <= link + tolerance
        else:
            assert cpu == pytest.approx(link, abs=tolerance)

    @given(rooflines, lengths, st.floats(1.0, 10.0))
    def test_a_slower_side_never_gets_more(self, roofline, num_placed, factor):
        slow_cpu = dataclasses.replace(roofline, cpu_s_per_entry=roofline.cpu_s_per_entry * factor)
        late_cpu = dataclasses.replace(roofline, cpu_fixed_s=roofline.cpu_fixed_s * factor)
        share = roofline.cpu_share(num_placed) + 1e-12
        assert slow_cpu.cpu_share(num_placed) <= share
        assert late_cpu.cpu_share(num_placed) <= share

    @pytest.mark.parametrize(
        ("layers", "entry_bytes", "unpinned_gb", "pinned_gb"),
        [
            (27, 2 * 576, 15.95, 16.66),  # DeepSeek-V2-Lite
            (48, 2 * 2 * 4 * 128, 61.95, 41.13),  # Qwen3-30B-A3B
            (32, 2 * 2 * 8 * 128, 103.08, 34.36),  # Mixtral-8x7B
        ],
    )
    def test_memory_table_of_the_paper(self, layers, entry_bytes, unpinned_gb, pinned_gb):
        """At 32 sequences of 32K the bytes of both regions imply B : A, and B : A the bytes."""
        num_placed = 32 * 32_768
        total_gb = num_placed * entry_bytes * layers / 1e9
        assert total_gb == pytest.approx(unpinned_gb + pinned_gb, abs=0.01)
        link = entry_bytes / 25.4e9  # the paper's link
        cpu = link * pinned_gb / unpinned_gb
        roofline = Roofline(cpu_s_per_entry=cpu, link_s_per_entry=link)
        assert roofline.cpu_share(num_placed) * total_gb == pytest.approx(unpinned_gb, abs=0.01)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"cpu_s_per_entry": 0.0},
            {"link_s_per_entry": -1e-9},
            {"cpu_s_per_entry": math.nan},
            {"link_s_per_entry": math.inf},
            {"cpu_fixed_s": -1e-9},
            {"link_fixed_s": math.nan},
        ],
    )
    def test_wrong_costs_are_refused(self, wrong):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Roofline(**{"cpu_s_per_entry": 1e-8, "link_s_per_entry": 1e-8, **wrong})

    @pytest.mark.parametrize("num_placed", [-1, math.nan])
    def test_wrong_length_is_refused(self, num_placed):
        with pytest.raises(UsageError, match="num_placed"):
            Roofline(cpu_s_per_entry=1e-8, link_s_per_entry=1e-8).cpu_share(num_placed)


class TestAbsurdTimings:
    roofline = Roofline(
        cpu_s_per_entry=40e-9, link_s_per_entry=60e-9, cpu_fixed_s=1e-5, link_fixed_s=2e-5
    )

    @pytest.mark.parametrize("time_ns", [0, -1, -1e18, math.nan, math.inf, -math.inf, 1e18])
    def test_old_values_are_kept(self, time_ns):
        timing = dataclasses.replace(
            Machine().step(5_000, 5_000), cpu_ns=time_ns, link_ns=time_ns, wait_cpu_ns=time_ns
        )
        assert self.roofline.observe(timing) == self.roofline

    @pytest.mark.parametrize("name", ["link_idle_ns", "wait_cpu_ns", "wait_link_ns"])
    @pytest.mark.parametrize("time_ns", [-1, math.nan, -math.inf, 1e18])
    def test_absurd_waits_say_nothing(self, name, time_ns):
        timing = Machine(unseen_link=5e-4).step(5_000, 5_000)
        roofline = self.roofline
        for _ in range(20):
            roofline = roofline.observe(dataclasses.replace(timing, **{name: time_ns}))
        assert roofline.nudge == 0

    def test_a_cost_at_its_limit_is_still_followed(self):
        roofline = Roofline(cpu_s_per_entry=10.0, link_s_per_entry=10.0, nudge=-0.7)
        assert 0 < roofline.observe(Machine().step(5_000, 5_000)).cpu_share(10_000) < 1

    @pytest.mark.parametrize("count", [0, -1, math.nan, math.inf, 10**40])
    @pytest.mark.parametrize("field", ["entries", "jobs"])
    def test_old_values_are_kept_for_absurd_counts(self, field, count):
        names = ("host_entries", "streamed_entries") if field == "entries" else ("jobs",)
        timing = dataclasses.replace(Machine().step(6_000, 4_000), **dict.fromkeys(names, count))
        after = self.roofline.observe(timing)
        assert after.cpu_s_per_entry == self.roofline.cpu_s_per_entry
        assert after.link_s_per_entry == self.roofline.link_s_per_entry

    def test_one_absurd_side_does_not_spoil_the_other(self):
        timing = dataclasses.replace(Machine(link=120e-9).step(6_000, 4_000), cpu_ns=math.nan)
        roofline = self.roofline
        for _ in range(30):
            roofline = roofline.observe(timing)
        assert roofline.cpu_s_per_entry == self.roofline.cpu_s_per_entry
        assert roofline.link_s_per_entry == pytest.approx(120e-9, rel=0.06)

    @given(rooflines, st.lists(absurd_timings | sane_timings, max_size=8), lengths)
    def test_any_timing_leaves_a_share(self, roofline, timings, num_placed):
        for timing in timings:
            roofline = roofline.observe(timing)
            assert 0 <= roofline.cpu_share(num_placed) <= 1

    @given(rooflines, st.lists(sane_timings, max_size=8))
    def test_one_timing_moves_the_share_a_little_at_most(self, roofline, timings):
        for timing in timings:
            after = roofline.observe(timing)
            for name in ("cpu_s_per_entry", "link_s_per_entry"):
                change = getattr(after, name) / getattr(roofline, name)
                assert abs(math.log(change)) <= math.log(MOST_CHANGE) + 1e-9
            num_placed = (timing.host_entries + timing.streamed_entries) / timing.jobs
            change = after.cpu_share(num_placed) - roofline.cpu_share(num_placed)
            assert num_placed == 0 or abs(change) <= 0.4
            roofline = after

    def test_two_preempted_workers_in_a_row_change_nothing(self):
        machine = Machine()
        roofline = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        for step in range(60):
            timing = machine.step(6_000, 4_000)
            if step % 6 < 2:
                timing = dataclasses.replace(timing, cpu_ns=timing.cpu_ns * 1_000)
            roofline = roofline.observe(timing)
            assert roofline.cpu_share(10_000) == pytest.approx(0.6)


class TestFeedback:
    @pytest.mark.parametrize("wrong_by", [0.01, 0.5, 3.0, 100.0])
    def test_finds_the_balance_from_a_wrong_calibration(self, wrong_by):
        machine = Machine(noise=0.05)
        start = Roofline(cpu_s_per_entry=machine.cpu * wrong_by, link_s_per_entry=machine.link)
        _, shares = follow(start, machine, 100_000, 80)
        assert all(share == pytest.approx(0.6, abs=0.02) for share in shares[50:])

    def test_follows_a_cpu_that_becomes_half_as_fast(self):
        machine = Machine(cpu=30e-9, link=60e-9, noise=0.05)
        roofline = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        roofline, shares = follow(roofline, machine, 100_000, 30)
        assert shares[-1] == pytest.approx(2 / 3, abs=0.02)
        machine.cpu = 60e-9
        roofline, shares = follow(roofline, machine, 100_000, 60)
        assert all(share == pytest.approx(1 / 2, abs=0.025) for share in shares[20:])
        machine.cpu = 30e-9
        _, shares = follow(roofline, machine, 100_000, 60)
        assert all(share == pytest.approx(2 / 3, abs=0.025) for share in shares[20:])

    def test_wrong_fixed_costs_do_not_spoil_the_balance(self):
        machine = Machine(cpu_fixed=3e-4, link_fixed=1e-4)
        start = Roofline(
            cpu_s_per_entry=machine.cpu,
            link_s_per_entry=machine.link,
            cpu_fixed_s=5e-3,
            link_fixed_s=0.0,
        )
        _, shares = follow(start, machine, 100_000, 80)
        share = shares[-1]
        cpu = machine.cpu * share * 100_000 + machine.cpu_fixed
        link = machine.link * (1 - share) * 100_000 + machine.link_fixed
        assert cpu == pytest.approx(link, rel=0.06)

    def test_few_entries_do_not_spoil_the_cost(self):
        """Where the fixed cost is nearly all of a time, the time says nothing about the entries."""
        machine = Machine(cpu_fixed=2e-4, link_fixed=2e-4, noise=0.1)
        start = Roofline(
            cpu_s_per_entry=machine.cpu,
            link_s_per_entry=machine.link,
            cpu_fixed_s=2e-4,
            link_fixed_s=2e-4,
        )
        roofline, _ = follow(start, machine, 600, 50)
        assert roofline.cpu_share(1_000_000) == pytest.approx(0.6, abs=0.05)

    @pytest.mark.parametrize("noise", [0.0, 0.2])
    @pytest.mark.parametrize("unseen", [5e-4, -5e-4])
    def test_waits_correct_what_the_times_do_not_show(self, unseen, noise):
        machine = Machine(unseen_link=unseen, noise=noise)
        start = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        _, shares = follow(start, machine, 100_000, 200)
        balance = (machine.link * 100_000 + unseen) / ((machine.cpu + machine.link) * 100_000)
        assert all(share == pytest.approx(balance, abs=0.03) for share in shares[100:])

    @pytest.mark.parametrize("noise", [0.0, 0.3])
    def test_settles_without_oscillation(self, noise):
        machine = Machine(noise=noise)
        start = Roofline(cpu_s_per_entry=machine.cpu * 4, link_s_per_entry=machine.link)
        _, shares = follow(start, machine, 100_000, 300)
        settled = shares[60:]
        assert max(settled) - min(settled) < 0.01 + 0.4 * noise
        steps = [abs(b - a) for a, b in itertools.pairwise(settled)]
        assert max(steps) < 0.01 + 0.1 * noise

    @pytest.mark.parametrize("hand_over", [0.0, 2e-4])
    @pytest.mark.parametrize("first", [0.5, 0.6, 0.7])
    def test_what_the_link_copies_ahead_is_not_the_cpu_s_fault(self, hand_over, first):
        """Each prompt is placed once, by what the steps of the one before taught: r must not swing."""
        machine = Machine(unseen_link=-hand_over, ahead=4e-4, noise=0.02)
        roofline = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        num_placed, share, shares = 100_000, first, []
        for _ in range(8):
            host = round(share * num_placed)
            for _ in range(60):
                roofline = roofline.observe(machine.step(host, num_placed - host))
            shares.append(share := roofline.cpu_share(num_placed))
        balance = 0.6 - hand_over / ((machine.cpu + machine.link) * num_placed)
        assert all(share == pytest.approx(balance, abs=0.012) for share in shares[1:])

    @pytest.mark.parametrize("others", [0.0, 2e-3])
    def test_a_link_that_others_hold_up_is_not_the_cpu_s_fault(self, others):
        """The device works on something else for long: full slots then say nothing, but what it waits for does."""
        machine = Machine(unseen_link=-4e-4, others=others, noise=0.02)
        start = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        _, shares = follow(start, machine, 100_000, 200)
        assert all(share == pytest.approx(0.6 - 0.04, abs=0.01) for share in shares[120:])

    @pytest.mark.parametrize("idle", [math.inf, None])
    def test_waits_that_tell_nothing_of_the_link_count_as_they_are(self, idle):
        machine = Machine(unseen_link=-4e-4)
        roofline = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        for _ in range(150):
            timing = machine.step(60_000, 40_000)
            known = {} if idle is None else {"link_idle_ns": idle}
            fields = dataclasses.asdict(timing)
            del fields["link_idle_ns"]
            roofline = roofline.observe(StepTiming(**fields, **known))
        assert roofline.cpu_share(100_000) == pytest.approx(0.56, abs=0.01)

    def test_slow_placement_does_not_wind_the_nudge_up(self):
        """A prompt that was placed wrongly leaves the waits one-sided for long: r must not run away."""
        machine = Machine(noise=0.05)
        start = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        for unpinned in (0, 100, 200, 400):
            roofline, shares, _ = place(start, machine, 2_000, (unpinned, 400), every=8)
            assert all(share == pytest.approx(0.6, abs=0.04) for share in shares[20:])
            assert abs(roofline.nudge) < 0.2

    def test_contention_comes_and_goes(self):
        machine = Machine(noise=0.05)
        roofline = Roofline(cpu_s_per_entry=machine.cpu, link_s_per_entry=machine.link)
        roofline, _, blocks = place(roofline, machine, 400, (60, 100), every=2)
        machine.cpu *= 20
        roofline, shares, blocks = place(roofline, machine, 400, blocks, every=2)
        assert shares[-1] < 0.15
        machine.cpu /= 20
        _, shares, blocks = place(roofline, machine, 1_000, blocks, every=2)
        assert shares[-1] == pytest.approx(0.6, abs=0.03)
        assert blocks[0] / blocks[1] == pytest.approx(0.6, abs=0.1)

    def test_a_side_without_entries_is_tried_again(self):
        """A CPU that was once measured 1000 times too slow gets a block and is measured anew."""
        machine = Machine()
        start = Roofline(cpu_s_per_entry=machine.cpu * 1_000, link_s_per_entry=machine.link)
        _, shares, _ = place(start, machine, 400, (0, 10), every=4)
        assert shares[-1] == pytest.approx(0.6, abs=0.02)
