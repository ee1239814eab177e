"""What is read of a footer is what Arrow reads of it."""

import pyarrow.parquet as pq
import pytest

from precdoctor.runlog import pages
from precdoctor.runlog.pages import read_footer
from tests.support.runs import write_run


@pytest.fixture
def parts(tmp_path):
    rows = [{"step": s, "module": m, "amax": float(s), "exp_hist": [1, 2]} for s in range(40) for m in "ab"]
    return sorted(write_run(tmp_path / "run", rows, [{"step": 3, "lrs": [0.1]}]).glob("rank-00000/*.parquet"))


def test_a_footer_as_arrow_reads_it(parts):
    for part in (*parts, *parts):  # the second time the schema is known
        metadata, groups = pq.read_metadata(part), read_footer(part.read_bytes())
        assert len(groups) == metadata.num_row_groups
        for n, group in enumerate(groups):
            columns = [metadata.row_group(n).column(i) for i in range(metadata.num_columns)]
            first = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns]
            assert [c.values for c in group.chunks] == [c.num_values for c in columns]
            assert [c.start for c in group.chunks] == first
            assert [c.end - c.start for c in group.chunks] == [c.total_compressed_size for c in columns]
            (bounds,) = (c.bounds for c in group.chunks if c.name == "step")
            stated = next(c.statistics for c in columns if c.path_in_schema == "step")
            assert bounds == (stated.min, stated.max)


@pytest.mark.parametrize("kind", pages._SKIPPABLE)
def test_what_is_passed_over_ends_where_it_ends(parts, kind):
    passed = 0
    for part in parts:
        content = part.read_bytes()
        for at in range(content.rindex(b"schema"), len(content) - 8):
            found = pages._SKIPPABLE[kind].match(content, at)
            if found:
                assert found.end() == pages._value(content, at, kind, {}, 0)[1]
                passed += 1
    assert passed > 100
