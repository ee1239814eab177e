"""Which samples a data loader delivered."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, dataloader

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.scene.deliveries import Deliveries

NAN = float("nan")


@pytest.fixture
def deliveries(tmp_path, monkeypatch):
    base, single = dataloader._BaseDataLoaderIter, dataloader._SingleProcessDataLoaderIter
    several = dataloader._MultiProcessingDataLoaderIter
    for kind, name in ((base, "_next_index"), (single, "_next_data"), (several, "_next_data")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # put back afterwards
    made = Deliveries(Recorder(tmp_path / "run", RecordOptions()))
    made.install()
    return made


def table(bad=7, rows=24):
    x = torch.arange(rows * 3.0).reshape(rows, 3)
    x[bad, 1] = NAN
    return TensorDataset(x, torch.zeros(rows))


def bad_samples(deliveries, loader):
    found = []
    for _ in loader:
        found += [f.get("indices") for f in deliveries.facts()["bad_fields"]][:1]
        deliveries.latest.clear()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_the_index_is_the_samplers(deliveries, workers):
    shuffled = DataLoader(table(), batch_size=4, shuffle=True, num_workers=workers)
    assert bad_samples(deliveries, shuffled) == [[7]]
    assert bad_samples(deliveries, shuffled) == [[7]]


def test_an_epoch_left_early_shifts_nothing(deliveries):
    loader = DataLoader(table(), batch_size=4, num_workers=2, persistent_workers=True)
    for i, _ in enumerate(loader):
        if i == 1:
            break
    deliveries.latest.clear()
    assert bad_samples(deliveries, loader) == [[7]]


def test_the_index_is_that_of_the_data_set_itself(deliveries):
    part = Subset(Subset(table(), range(4, 20)), [0, 3, 5])
    assert bad_samples(deliveries, DataLoader(part, batch_size=3)) == [[7]]
    for _ in range(6):  # eight in all
        part = Subset(part, [0, 1, 2])
    assert bad_samples(deliveries, DataLoader(part, batch_size=3)) == [[7]]


def test_no_index_is_made_up(deliveries):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(table())

    def filtered(items):
        return torch.stack([x for x, _ in items if x[0] > 0])

    def transposed(items):
        return torch.stack([x for x, _ in items], dim=1)

    assert bad_samples(deliveries, DataLoader(Stream(), batch_size=4)) == [None]
    assert bad_samples(deliveries, DataLoader(table(1), batch_size=4, collate_fn=filtered)) == [None]
    assert bad_samples(deliveries, DataLoader(table(1), batch_size=3, collate_fn=transposed)) == [None]


def test_a_collate_function_may_have_changed_the_order(deliveries):
    loader = DataLoader(
        table(), batch_size=4, collate_fn=lambda items: [torch.stack(x) for x in zip(*items, strict=True)]
    )
    for _ in zip(range(2), loader, strict=False):
        pass
    (facts,) = deliveries.facts()["bad_fields"]
    assert (facts["field"], facts["samples"], facts["indices"], facts["in_order"]) == ("0", [3], [7], False)


def test_what_was_written_to_since_is_not_what_was_delivered(deliveries):
    (batch,) = DataLoader(table(), batch_size=24)
    assert deliveries.facts()["data_is_finite"] is False
    batch[0].nan_to_num_()
    assert deliveries.facts() == {"bad_fields": [], "data_is_finite": None}


def test_masks_are_no_missing_values(deliveries):
    x = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
    list(DataLoader(TensorDataset(x), batch_size=2))
    assert deliveries.facts() == {"bad_fields": [], "data_is_finite": True}


def test_large_batches_are_not_kept_alive(deliveries, monkeypatch):
    monkeypatch.setattr("precdoctor.recording.scene.deliveries._KEPT", 16)
    list(DataLoader(table(), batch_size=8))
    assert all(f.now() is None for batch in deliveries.latest for f in batch.fields)
    assert deliveries.facts()["data_is_finite"] is None
