"""Copies of weights that ranks share out, on what DeepSpeed 0.19.8 and Megatron-core 0.16.1 keep at the weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from precdoctor.recording.model.weight_pieces import Pieces, stored


def found(pieces: Pieces, flat: torch.Tensor) -> list[tuple[torch.Tensor | None, slice | None]]:
    return [(piece.weight(), piece.part) for piece in pieces.of(flat)]


def same(got: list, expected: list) -> bool:
    return len(got) == len(expected) and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(got, expected, strict=True))


def test_fragments_of_a_flat_partition_come_in_its_order():
    model, flat = nn.Linear(4, 3).half(), torch.zeros(14)
    model.weight._hp_mapping = SimpleNamespace(hp_fragment=flat.narrow(0, 3, 11))
    model.bias._hp_mapping = SimpleNamespace(hp_fragment=flat.narrow(0, 0, 3))
    assert same(found(Pieces(lambda: [model]), flat), [(model.bias, slice(0, 3)), (model.weight, slice(3, 14))])


def test_a_weight_of_which_this_rank_has_no_part_is_replicated_all_the_same():
    model, flat = nn.Linear(4, 3).half(), torch.zeros(12)
    model.weight._hp_mapping = SimpleNamespace(hp_fragment=flat)
    model.bias._hp_mapping = None
    pieces = Pieces(lambda: [model])
    assert same(found(pieces, flat), [(model.weight, slice(0, 12))])
    assert [id(w) for w in pieces.replicated()] == [id(model.weight), id(model.bias)]


def test_positions_of_zero_3_are_those_in_a_group():
    model, groups = nn.Linear(4, 3).half(), [torch.zeros(6), torch.zeros(2)]
    zero = SimpleNamespace(grad_position={7: [0, 0, 6], 8: [1, 0, 2]}, fp32_partitioned_groups_flat=groups)
    for weight, number in ((model.weight, 7), (model.bias, 8)):
        weight._z3_optimizer, weight.ds_id, weight.ds_tensor = zero, number, torch.ones(6).half()
    pieces = Pieces(lambda: [model])
    assert same(found(pieces, groups[0]), [(model.weight, slice(0, 6))])
    assert same(found(pieces, groups[1]), [(model.bias, slice(0, 2))])
    assert stored(model.weight) is model.weight.ds_tensor


def test_flat_groups_without_zero_have_the_order_of_the_16_bit_ones():
    class DeepSpeedEngine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 3).half()
            narrow = torch.zeros(15).half()
            self.module.weight.data, self.module.bias.data = narrow[:12].view(3, 4), narrow[12:]
            self.optimizer = SimpleNamespace(fp16_groups_flat=[narrow], fp32_groups_flat=[narrow.float()])

    engine = DeepSpeedEngine()
    model, (wide,) = engine.module, engine.optimizer.fp32_groups_flat
    got = found(Pieces(lambda: [engine]), wide)
    assert same(got, [(model.weight, slice(0, 12)), (model.bias, slice(12, 15))])


def test_a_whole_copy_is_no_part():
    model = nn.Linear(4, 3).half()
    model.weight.main_param = model.weight.detach().float()
    assert same(found(Pieces(lambda: [model]), model.weight.main_param), [(model.weight, None)])


def test_a_copy_that_moved_is_looked_for_again():
    model, flat = nn.Linear(4, 3).half(), torch.zeros(12)
    model.weight.main_param = flat
    pieces = Pieces(lambda: [model])
    assert len(pieces.of(flat)) == 1
    flat.data, model.weight.main_param = torch.zeros(12), None
    pieces.begin()
    assert pieces.of(flat) == ()


def test_what_no_weight_lies_in_has_no_pieces():
    pieces = Pieces(lambda: [nn.Linear(4, 3)])
    assert (
        pieces.of(torch.zeros(12)) == pieces.of(torch.zeros(3, 4).t()) == pieces.of(torch.zeros(2, device="meta")) == ()
    )
