"""Statistics by token, channel, head and 128 features, against the same counted from each group."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from precdoctor.numerics.group_prediction import LIMIT  # noqa: E402
from precdoctor.recording.output.group_columns import group_columns  # noqa: E402
from precdoctor.recording.slots import group_sums as module  # noqa: E402
from precdoctor.recording.slots.group_sums import group_sums, measured_groups  # noqa: E402
from precdoctor.recording.slots.slot_table import Entry, Site  # noqa: E402
from tests.support.references import groups_of  # noqa: E402

PLACE = ("GPT#0", "attention", "Attention")


def in_rows(x):
    rows = x.reshape(-1, x.shape[-1])
    padded = np.zeros((len(rows), -(-rows.shape[1] // 128) * 128))
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(-1, 128)


def flat(x):
    return x.reshape(-1, x.shape[-1])


#: Kind, shape, and the groups of each grouping.
LAYOUTS = {
    "linear weight": ("weight", (24, 300), {"channel": lambda x: x, "group128": in_rows}),
    "conv weight": (
        "weight", (8, 5, 3, 3),
        {"channel": lambda x: x.reshape(8, -1), "group128": lambda x: in_rows(x.reshape(8, -1))},
    ),
    "tokens": (
        "output", (3, 10, 200),
        {"token": flat, "channel": lambda x: flat(x).T, "group128": in_rows},
    ),
    "images": (
        "input", (2, 6, 9, 7),
        {
            "token": lambda x: flat(np.moveaxis(x, 1, -1)), "channel": lambda x: flat(np.moveaxis(x, 1, -1)).T,
            "group128": lambda x: in_rows(np.moveaxis(x, 1, -1)),
        },
    ),
    "cache": (
        "kv_key", (2, 4, 11, 32),
        {
            "token": flat, "channel": lambda x: x.transpose(1, 3, 0, 2).reshape(4 * 32, -1),
            "head": lambda x: x.transpose(1, 0, 2, 3).reshape(4, -1), "group128": in_rows,
        },
    ),
}  # fmt: skip


def found(kind, x):
    sums = group_sums(kind, x)
    numbers = np.array(sums.numbers()).reshape(len(sums.groupings), 2, LIMIT)
    return dict(zip(sums.groupings, numbers, strict=True))


def expected(groups):
    counted = groups_of(groups)
    return np.array(counted.counts), np.array(counted.energy)


@pytest.mark.parametrize("chunk", [1 << 18, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_counted(monkeypatch, layout, dtype, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    kind, shape, ways = LAYOUTS[layout]
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.randn(shape[-1]).exp()).to(dtype)
    x[..., 0] = 0.0
    got = found(kind, x)
    assert set(got) == set(ways)
    for grouping, way in ways.items():
        counts, energy = expected(way(x.double().numpy()))
        # The quotient is rounded to FP32: an element beside a power of two may fall on its other side.
        assert np.abs(got[grouping][0] - counts).sum() <= 2 + 1e-4 * counts.sum()
        assert got[grouping][1].sum() == pytest.approx(energy.sum(), rel=1e-6)


def test_strides_do_not_matter_and_what_is_not_finite_counts_as_zero():
    x = torch.randn(3, 5, 40)
    x[1, 2] = torch.tensor(float("nan"))
    x[0, 0, 0], x[2, 1, 3] = float("inf"), float("-inf")
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    one, other = found("output", x), found("output", turned)
    finite = np.where(np.isfinite(x.double().numpy()), x.double().numpy(), 0.0)
    for grouping in one:
        assert np.array_equal(one[grouping], other[grouping])
    assert one["token"][0].sum() == expected(flat(finite))[0].sum()


def test_what_has_no_groups_is_left_alone():
    assert group_sums("weight", torch.randn(8)) is None
    assert group_sums("kv_key", torch.randn(4, 8)) is None
    assert group_sums("grad_output", torch.randn(4, 8)) is None


def test_tensors_of_one_slot_add_up_in_its_columns():
    site = Site(PLACE, "output", "", 0, "no_grad", "float32")
    first, second, other = (Entry(i, site, torch.device("cpu")) for i in range(3))
    x, y = torch.randn(4, 16), torch.randn(6, 16)
    first.groups += measured_groups("output", x)
    second.groups += measured_groups("output", x)
    second.groups += measured_groups("output", y)
    columns = group_columns([first, other, second])
    assert set(columns) == {f"{g}_{part}" for g in ("token", "channel", "group128") for part in ("hist", "energy")}
    alone, nothing, both = columns["token_hist"].to_pylist()
    assert nothing is None
    assert sum(both) == 4 * 15 + 6 * 15 and sum(alone) == 4 * 15
    assert sum(columns["token_energy"].to_pylist()[2]) == pytest.approx(
        15 * float(x.abs().amax(1).square().sum() + y.abs().amax(1).square().sum())
    )
    assert group_columns([other]) == {}
