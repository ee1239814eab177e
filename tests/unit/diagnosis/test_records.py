"""Rows as dictionaries hold what their frame holds."""

import math

import numpy as np
import pyarrow as pa
import pytest

from precdoctor.diagnosis.survey.arrow_rows import batch_records, records

BATCH = pa.record_batch(
    {
        "step": pa.array([0, 1, 2], pa.int64()),
        "order": pa.array([3, None, 5], pa.int64()),
        "fingerprint": pa.array([2**64 - 1, 0, 1], pa.uint64()),
        "amax": pa.array([1.5, math.inf, None], pa.float64()),
        "skipped": pa.array([True, None, False]),
        "module": pa.array(["a", "", None]).dictionary_encode(),
        "shape": pa.array([[2, 3], None, []], pa.list_(pa.int64())),
    }
)


def _plain(value):
    if isinstance(value, np.ndarray):
        return ["array", *value.tolist()]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("batch", [BATCH, BATCH.slice(1), BATCH.slice(0, 1), BATCH.slice(0, 0)], ids=range(4))
def test_a_batch_says_what_its_frame_says(batch):
    expected = [{str(k): _plain(v) for k, v in row.items()} for row in batch.to_pandas().to_dict("records")]
    for found in (batch_records(batch), records(batch.to_pandas())):
        assert [{k: _plain(v) for k, v in row.items()} for row in found] == expected
    assert all(type(row["step"]) is int for row in batch_records(batch))
