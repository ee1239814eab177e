"""A short, seeded slice of each section of ``make torture``; the fuzzer's readers take what their writers wrote."""

import pytest

from benchmarks.torture import commands, files, processes, targets


@pytest.mark.parametrize(
    ("section", "count"),
    [
        (files.kills, 5),
        (files.mutations, 42),
        (files.names, 2),
        pytest.param(commands.commands, 2, marks=pytest.mark.slow),
        pytest.param(files.bombs, 2, marks=pytest.mark.slow),
        pytest.param(processes.environments, 1, marks=pytest.mark.slow),
        pytest.param(processes.threads, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_slice_of(section, count, tmp_path):
    said = section(tmp_path, 20261124, count)
    assert said.startswith(str(count))
    assert "\n" not in said


def test_good_files_are_answered_and_cut_ones_refused(tmp_path):
    for target in targets.targets(tmp_path):
        assert targets.attempt(target, target.seeds[0]), target.name
        if not target.name.endswith(("attach.jsonl", ".arrows")):  # of these what is left is read
            assert not targets.attempt(target, target.seeds[0][:-20]), target.name


def test_anything_but_an_answer_or_one_of_our_errors_is_a_finding(tmp_path):
    (tmp_path / "file").write_bytes(b"good")

    def ask(content):
        raise IndexError(content)

    with pytest.raises(IndexError):
        targets.attempt(targets.Target("x", tmp_path / "file", (b"good",), ask), b"bad")
