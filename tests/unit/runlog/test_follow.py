"""A follower gives every row of a growing run once and in order, however the writer rotates and the reader looks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.errors import CorruptRunError, RunUnreadableError
from precdoctor.runlog import RankWriter, create_rank_directory, create_run, open_run
from precdoctor.runlog.follow import Follower
from tests.support.runs import columns_of, write_run


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def steps_of(follower):
    return [
        row
        for batch in follower.new("steps", ["rank", "step"])
        for row in zip(*batch.to_pydict().values(), strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 5)),
            st.tuples(st.just("rotate"), st.just(0), st.just(0)),
            st.tuples(st.just("look"), st.just(0), st.just(0)),
        ),
        max_size=25,
    )
)
def test_every_row_comes_once_and_in_order(tmp_path_factory, actions):
    path = tmp_path_factory.mktemp("runs") / "run"
    create_run(path, {})
    clock = Clock()
    writers = [RankWriter(create_rank_directory(path, rank), clock=clock) for rank in range(2)]
    follower = Follower(path)
    written, seen = {0: [], 1: []}, {0: [], 1: []}

    def look():
        for rank, step in steps_of(follower):
            seen[rank].append(step)

    for action, rank, count in actions:
        if action == "write":
            first = len(written[rank])
            rows = [{"step": first + i} for i in range(count)]
            writers[rank].append("steps", columns_of("steps", rows, rank), count)
            written[rank] += [row["step"] for row in rows]
        elif action == "rotate":
            clock.now += 100.0  # each stream is sealed by its next append
        else:
            look()
            assert seen == written
    for writer in writers:
        writer.close({})
    look()
    assert seen == written
    assert steps_of(follower) == []


def test_what_is_long_past_can_be_passed_over(tmp_path):
    clock = Clock()
    path = tmp_path / "run"
    create_run(path, {})
    writer = RankWriter(create_rank_directory(path, 0), clock=clock, rotate_seconds=1.0)
    for step in range(6):
        clock.now += 0.6  # two appends to a part
        writer.append("steps", columns_of("steps", [{"step": step}]), 1)
    follower = Follower(path)
    follower.skip_old("steps", keep=1)
    recent = [step for _, step in steps_of(follower)]
    assert 0 < len(recent) < 6 and recent[-1] == 5
    writer.append("steps", columns_of("steps", [{"step": 6}]), 1)
    assert steps_of(follower) == [(0, 6)]
    writer.abandon()


def test_it_reads_what_the_reader_reads(tmp_path):
    rows = [{"step": s, "module": f"m{s % 3}", "amax": float(s)} for s in range(50)]
    path = write_run(tmp_path / "run", rows, end=False)
    whole = [b.to_pydict() for b in open_run(path).batches("tensors", ["step", "module", "amax"])]
    assert [b.to_pydict() for b in Follower(path).new("tensors", ["step", "module", "amax"])] == whole


def test_damage_and_absence_are_our_errors(tmp_path):
    path = write_run(tmp_path / "run", steps=[{"step": 0}])
    part = next(path.glob("rank-*/steps-*.parquet"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(CorruptRunError, match="is damaged"):
        steps_of(Follower(path))
    with pytest.raises(RunUnreadableError, match="cannot read"):
        steps_of(Follower(tmp_path / "nowhere"))
