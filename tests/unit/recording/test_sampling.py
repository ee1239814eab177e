"""Which steps are sampled, counted without a model and without a clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder.sampling import MAX_PERIOD, WARM_UP, Sampler

MS = 1_000_000
PERIODS = st.integers(0, 6).map(lambda n: 1 << n)


def train(
    sampler: Sampler,
    optimizers: Iterable[str],
    *,
    first_step: int = 0,
    step_ns: int = 100 * MS,
    sampled_ns: int = 0,
    other_ns: int = 0,
    behind: bool = False,
) -> tuple[list[bool], list[dict]]:
    """What was sampled, and every change of the period."""
    sampled, changes = [], []
    for step, optimizer in enumerate(optimizers, first_step):
        sampled.append(sampler.wants(step))
        cost = sampled_ns if sampled[-1] else other_ns
        sampler.ended(optimizer, sampled=sampled[-1], step_ns=step_ns + cost, cost_ns=cost)
        if sampled[-1] and (change := sampler.reconsider(behind=behind)) is not None:
            changes.append(change)
    return sampled, changes


def moves(period: int) -> list[int]:
    """How N gets there behind the warm-up, and then stays: it is at most an eighth of the steps so far."""
    return [n for n in (8, 16, 32, 64, 128, 256, 512, 1024) if n < period] + ([period] if period > 1 else [])


@given(PERIODS, st.integers(0, 100), st.tuples(st.none() | st.integers(0, 90), st.none() | st.integers(91, 150)))
def test_with_one_optimizer_every_nth_step_of_a_half_open_range(period, first_step, steps):
    options = RecordOptions(every=period, first_step=first_step, steps=steps)
    sampled, changes = train(Sampler(options), ["Adam#0"] * 100, first_step=first_step)
    for step, chosen in enumerate(sampled, first_step):
        assert chosen == (step % period == 0 and (steps[0] or 0) <= step < (1 << 40 if steps[1] is None else steps[1]))
    assert changes == []


@pytest.mark.parametrize("pattern", ["DG", "DDDDG", "DDDDDG", "DGE", "DDDGG"])
@given(period=PERIODS)
def test_with_several_optimizers_every_one_gets_its_samples(pattern, period):
    rounds = 4 * period + 16
    order = list(pattern) * rounds
    sampled, _ = train(Sampler(RecordOptions(every=period)), order)
    for optimizer in set(pattern):
        own = [chosen for name, chosen in zip(order, sampled, strict=True) if name == optimizer]
        attempts = [n for n, chosen in enumerate(own) if chosen]
        late = [n for n in attempts if n > 2 * period + len(pattern)]  # by then the pattern is known
        assert late == list(range(late[0], len(own), period)), optimizer
        assert late[0] % period == 0


def test_an_optimizer_that_is_done_does_not_keep_the_sampling_on():
    order = ["warmup"] * 3 + ["Adam#0"] * 200
    sampled, _ = train(Sampler(RecordOptions(every=8)), order)
    assert 20 <= sum(sampled) <= 40


@pytest.mark.parametrize("trial", [1, 5, 40, 200])
def test_the_budget_holds_in_a_search_that_makes_an_optimizer_for_each_trial(trial):
    trials = 16_000 // trial
    order = [f"Adam#{n}" for n in range(trials) for _ in range(trial)]
    sampled, _ = train(Sampler(RecordOptions(budget=0.01)), order, sampled_ns=100 * MS)
    of = [sum(sampled[n * trial : (n + 1) * trial]) for n in range(trials)]
    assert min(of[:4]) >= min(trial, WARM_UP)
    first = 9 * WARM_UP  # of single steps nobody knows at first whether they come again
    assert sum(sampled) <= first + len(order) / 64  # N is 128 in the end
    late = [n for n in range(64 * WARM_UP, 16_000) if sampled[n]]
    assert max(b - a for a, b in itertools.pairwise(late)) <= 2 * 128


def test_one_optimizer_for_each_parameter_is_no_search():
    order = [f"SGD#{n}" for n in range(300)] * 80
    sampled, _ = train(Sampler(RecordOptions(budget=0.01)), order, sampled_ns=100 * MS)
    assert all(sampled[: 300 * WARM_UP])
    assert sum(sampled[300 * WARM_UP :]) <= 300 + 80


def test_an_optimizer_that_made_one_step_does_not_keep_the_budget_out():
    order = ["SGD#0"] + ["SGD#1"] * 2000
    sampled, changes = train(Sampler(RecordOptions(budget=0.01)), order, sampled_ns=100 * MS)
    assert [c["to"] for c in changes] == moves(128)
    assert all(sampled[:WARM_UP])
    assert sum(sampled[16 * WARM_UP :]) < 10


@given(PERIODS, PERIODS)
def test_two_runs_share_the_multiples_of_both_periods(a, b):
    runs = [train(Sampler(RecordOptions(every=n)), list("DG") * 300)[0] for n in (a, b)]
    both = [all(pair) for pair in zip(*runs, strict=True)]
    assert both == runs[0 if a >= b else 1]


def test_a_smoke_run_is_recorded_whole_whatever_it_costs():
    sampled, changes = train(Sampler(RecordOptions()), ["Adam#0"] * WARM_UP, sampled_ns=1000 * MS)
    assert all(sampled)
    assert WARM_UP >= 50  # what CI trains on every pull request
    assert [c["to"] for c in changes] == moves(MAX_PERIOD)[:1]  # and right behind it the budget rules


@pytest.mark.parametrize(
    ("sampled_ms", "period"), [(0.5, 1), (1.0, 1), (1.5, 2), (8.0, 8), (30.0, 32), (100.0, 128), (5000.0, MAX_PERIOD)]
)
def test_the_period_is_the_smallest_within_the_budget(sampled_ms, period):
    sampler = Sampler(RecordOptions(budget=0.01))
    sampled, changes = train(sampler, ["Adam#0"] * 20_000, sampled_ns=int(sampled_ms * MS))
    assert sampler.period == period
    assert [c["to"] for c in changes] == moves(period)
    after = sampled[max(2 * WARM_UP, 8 * period) :]
    assert sum(after) == pytest.approx(len(after) / period, abs=1 + 8 * (period == MAX_PERIOD))


@pytest.mark.parametrize("steps", [100, 200, 600, 3000, 20_000])
def test_either_half_of_a_run_has_samples_enough_for_a_median(steps):
    sampled, _ = train(Sampler(RecordOptions(budget=0.01)), ["Adam#0"] * steps, sampled_ns=5000 * MS)
    assert sum(sampled[: steps // 2]) >= 8
    assert sum(sampled[steps // 2 :]) >= 7
    assert sum(sampled) <= WARM_UP + 8 * (steps // WARM_UP).bit_length() + steps // MAX_PERIOD


def test_what_the_steps_between_cost_counts_too():
    sampler = Sampler(RecordOptions(budget=0.01))
    train(sampler, ["Adam#0"] * 4000, sampled_ns=8 * MS, other_ns=MS // 2)
    assert sampler.period == 16  # 8 ms / 16 + 0.5 ms; alone the 8 ms would allow 8


@pytest.mark.parametrize(("other_us", "period"), [(0, 1024), (6, 1024), (200, 128), (1000, 16)])
def test_short_steps_get_samples_although_no_period_keeps_the_budget(other_us, period):
    """A sample takes 8 ms beside a step of 1 ms; samples may cost half of what the other steps cost."""
    sampler = Sampler(RecordOptions(budget=0.01))
    _, changes = train(sampler, ["Adam#0"] * 10_000, step_ns=MS, sampled_ns=8 * MS, other_ns=other_us * 1000)
    assert [c["to"] for c in changes] == moves(period)


def test_the_period_comes_down_again_and_does_not_swing():
    sampler = Sampler(RecordOptions(budget=0.01))
    train(sampler, ["Adam#0"] * 1000, sampled_ns=30 * MS)
    assert sampler.period == 32
    _, changes = train(sampler, ["Adam#0"] * 3000, first_step=1000, sampled_ns=3 * MS)
    assert [c["to"] for c in changes] == [16, 8]  # at 4, where 3 ms in 4 steps fit, hardly any room would be left
    noise = itertools.cycle([0.9, 1.1])
    moved = []
    for step in range(4000, 8000):
        chosen = sampler.wants(step)
        cost = int(8 * MS * next(noise)) if chosen else 0
        sampler.ended("Adam#0", sampled=chosen, step_ns=100 * MS + cost, cost_ns=cost)
        moved += [c for c in [sampler.reconsider(behind=False)] if chosen and c]
    assert len(moved) <= 1


def test_each_change_tells_why():
    [change] = train(Sampler(RecordOptions(budget=0.02)), ["Adam#0"] * WARM_UP, sampled_ns=10 * MS)[1]
    assert change == {"reason": "budget", "from": 1, "to": 8, "overhead": 0.0125, "budget": 0.02}


def test_a_writer_that_is_behind_gets_fewer_rows_and_later_as_many_as_before():
    sampler = Sampler(RecordOptions(every=2))
    _, changes = train(sampler, ["Adam#0"] * 1000, behind=True)
    assert {c["reason"] for c in changes} == {"backlog"}
    assert sampler.period > 64
    _, changes = train(sampler, ["Adam#0"] * 20_000, first_step=1000)
    assert {c["reason"] for c in changes} == {"caught up"}
    assert sampler.period == 2


@pytest.mark.parametrize("optimizers", [1, 8])
def test_a_writer_that_is_behind_in_the_warm_up_gets_longer_and_longer_gaps(optimizers):
    sampler = Sampler(RecordOptions())
    names = [f"Adam#{i}" for i in range(optimizers)] * (WARM_UP // optimizers)  # as with an optimizer per parameter
    assert sum(train(sampler, names, behind=True)[0]) <= 8
    if optimizers > 1:  # once the writer has caught up, the rest of the warm-up is sampled as before
        assert sum(train(sampler, names * 4, first_step=WARM_UP)[0]) >= 2 * WARM_UP


def block_steps(options, optimizers):
    """Per optimizer: its attempts that got block histograms."""
    sampler, found, attempts = Sampler(options), {}, {}
    for step, optimizer in enumerate(optimizers, options.first_step):
        sampled = sampler.wants(step)
        if sampled and sampler.wants_blocks(step):
            found.setdefault(optimizer, []).append(attempts.get(optimizer, 0))
        attempts[optimizer] = attempts.get(optimizer, 0) + 1
        sampler.ended(optimizer, sampled=sampled, step_ns=100 * MS, cost_ns=0)
    return found


def test_block_histograms_are_taken_on_powers_of_two_and_every_64th_step():
    found = block_steps(RecordOptions(every=1), ["Adam#0"] * 200)
    assert found["Adam#0"] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert block_steps(RecordOptions(every=8), ["Adam#0"] * 200)["Adam#0"] == [0, 8, 16, 32, 64, 128, 192]


def test_the_first_step_recorded_has_block_histograms_whatever_its_number():
    assert block_steps(RecordOptions(every=1, steps=(5, 8)), ["Adam#0"] * 20)["Adam#0"] == [5]


@pytest.mark.parametrize("pattern", ["DG", "DDDDG", "DGE"])
def test_every_optimizer_gets_steps_with_block_histograms(pattern):
    found = block_steps(RecordOptions(every=1), list(pattern) * 40)
    for optimizer in set(pattern):
        assert {8, 16, 32} <= set(found[optimizer])
