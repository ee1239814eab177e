"""Which op a line on stderr names as the first that made something non-finite."""

from types import SimpleNamespace

import pytest

from precdoctor.recording.microscope.event_rows import origin
from precdoctor.recording.microscope.examination import Examination
from precdoctor.recording.microscope.slicing import Slice
from precdoctor.recording.microscope.tracer import External, OpRecord
from precdoctor.recording.ops.tensor_facts import NAN, NEG_INF

WEIGHT = ((External("weight", "fc.weight"), 1),)


def examined(*results, externals=(), fp64=None):
    """An incident whose origins are ops with these non-finite results, in order; ``fp64``: the first one's in FP64."""
    records = [OpRecord(i, f"op{i}", "forward", None, None, (), bad_out=bad) for i, bad in enumerate(results)]
    if fp64 is not None:
        records[0].facts["reference"] = fp64
    found = SimpleNamespace(tracer=SimpleNamespace(records=records), call=None)
    origins = tuple(range(len(results)))
    return Examination("origin", "forward", found=found, slice=Slice(origins, externals, origins, ()))


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (examined(NAN), ", first made by op0"),
        (examined(NEG_INF), ", first made by op0"),
        (examined(NEG_INF, NAN), ", first made by op1"),
        (examined(NEG_INF, externals=WEIGHT), ""),
        (examined(NEG_INF, NAN, externals=WEIGHT), ", first made by op1"),
        (examined(externals=WEIGHT), ""),
        (examined(NEG_INF, NAN, fp64={"nan": 0, "pos_inf": 0, "neg_inf": 3}), ", first made by op1"),
        (examined(NEG_INF, NAN, fp64={"nan": 0, "pos_inf": 0, "neg_inf": 0}), ", first made by op0"),
    ],
    ids=[
        *("nan", "logarithm-of-0", "mask-before-nan", "mask-beside-weight", "mask-and-nan-beside-weight", "weight"),
        *("logarithm-before-nan", "overflow-before-nan"),
    ],
)
def test_a_mask_is_no_origin_beside_something_worse(done, said):
    assert origin(done) == said
