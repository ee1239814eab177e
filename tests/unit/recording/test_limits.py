"""What limits on a process's memory leave, and when that is too little."""

from __future__ import annotations

import os
import resource
import sys

import pytest

from precdoctor.recording.process import memory_shortage

GIB = 1 << 30


@pytest.fixture
def limited(monkeypatch):
    """Pretend that a limit leaves so much."""
    size = int(memory_shortage.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def leave(number, left):
        monkeypatch.setattr(
            resource, "getrlimit", lambda asked: (size + left if asked == number else resource.RLIM_INFINITY, 0)
        )

    monkeypatch.setattr(memory_shortage, "_MEMBERSHIP", memory_shortage.Path("/nonexistent"))
    leave(None, 0)
    return leave


@pytest.fixture
def cgroups(tmp_path, monkeypatch, limited):
    """A tree of cgroups: `write` puts files into one, `join` makes this process a member."""
    monkeypatch.setattr(memory_shortage, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory_shortage, "_MEMBERSHIP", tmp_path / "cgroup")

    def write(folder, **files):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("memory_", "memory.")).write_text(text)

    def join(line):
        (tmp_path / "cgroup").write_text(f"3:cpu:/elsewhere\n{line}\n")

    return write, join


def test_without_limits_there_is_room(limited):
    assert memory_shortage.shortage() is None and memory_shortage.running_out() is None


def test_address_space_is_counted_from_what_is_in_use(limited):
    limited(resource.RLIMIT_AS, 3 * GIB)
    assert memory_shortage.shortage() is None and memory_shortage.running_out() is None
    limited(resource.RLIMIT_AS, GIB)
    assert "MiB of address space (ulimit -v) are left, and recording needs 2048 MiB" in memory_shortage.shortage()
    assert memory_shortage.running_out() is None
    limited(resource.RLIMIT_AS, GIB // 4)
    assert memory_shortage.running_out().endswith("recording needs 512 MiB")


def test_less_than_nothing_is_nothing(limited):
    limited(resource.RLIMIT_AS, -GIB)
    assert memory_shortage.shortage().startswith("0 MiB of address space")


def test_the_data_segment_counts_as_well(limited, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda n: (GIB if n == resource.RLIMIT_DATA else -1, 0))
    assert "of data segment (ulimit -d) are left" in memory_shortage.shortage()


def test_a_cgroup_of_version_2_and_those_above_it(cgroups):
    write, join = cgroups
    join("0::/job/step")
    write("job/step", memory_max="max\n", memory_current=str(GIB), memory_stat="anon 5\n")
    write("job", memory_max=f"{2 * GIB}\n", memory_current=f"{2 * GIB - 100}\n", memory_stat="inactive_file 0\n")
    assert memory_shortage.shortage() == "0 MiB of memory (of its cgroup) are left, and recording needs 512 MiB"
    write("job", memory_stat=f"active_file {GIB // 2}\ninactive_file {GIB // 4}\n")  # which the kernel gives back
    assert memory_shortage.shortage() is None


def test_a_cgroup_of_version_1_whose_path_is_the_hosts(cgroups):
    write, join = cgroups
    join("8:cpuset,memory:/docker/abc")
    write(
        "memory", memory_limit_in_bytes=str(GIB), memory_usage_in_bytes=str(GIB), memory_stat="total_inactive_file 0\n"
    )
    assert "of memory (of its cgroup) are left" in memory_shortage.shortage()
    write("memory", memory_limit_in_bytes="9223372036854771712")
    assert memory_shortage.shortage() is None


def test_what_cannot_be_read_is_no_limit(cgroups):
    write, join = cgroups
    join("0::/gone")
    write("gone", memory_max="nonsense", memory_current="1", memory_stat="")
    assert memory_shortage.shortage() is None


def test_arrow_is_asked_to_be_small_only_where_space_is_limited_and_for_no_child_of_the_script(limited, monkeypatch):
    class Arrow:
        def __init__(self):
            self.asked = None

        def default_memory_pool(self):
            self.asked = os.environ.get("ARROW_DEFAULT_MEMORY_POOL")

    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    for left, asked in ((None, None), (8 * GIB, "system")):
        limited(resource.RLIMIT_AS if left else None, left)
        monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
        arrow = Arrow()
        with memory_shortage.small_arrow():
            monkeypatch.setitem(sys.modules, "pyarrow", arrow)
        assert arrow.asked == asked
        assert "ARROW_DEFAULT_MEMORY_POOL" not in os.environ
