"""Names of modules and parameters: wrappers, shared parts, parts called alone, modules that come and go."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from precdoctor.recording.model import live_objects, static
from precdoctor.recording.model.module_names import Names, Place, class_name, unwrap


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.again = self.head


class DistributedDataParallel(nn.Module):  # the real one wants a process group; it is known by its name
    def __init__(self, module):
        super().__init__()
        self.module = module


class _FabricModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._forward_module = self._original_module = module


def compiled(module):
    return torch.compile(module, backend="eager")


@pytest.fixture
def forget_compiled():
    """Torch keeps the backends of a process; while it has any, recording does with less."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def names():
    return Names()


def test_a_root_is_numbered_and_its_modules_have_fully_qualified_names(names):
    net, other = Net(), Net()
    assert (names.place(net, None).root, names.place(net, None).module) == ("Net#0", "")
    assert names.place(net.body[0], None).module == "body.0"
    assert names.place(net.body[0], None).module_class == "Linear"
    assert names.place(other, None).root == "Net#1"


def test_shared_modules_and_tied_parameters_keep_their_first_name(names):
    net = Net()
    net.body[0].weight = nn.Parameter(torch.zeros(2, 4))
    net.head.weight = net.body[0].weight
    names.place(net, None)
    assert names.place(net.again, None).module == "head"
    place, own = names.parameter(net.head.weight)
    assert (place.module, own) == ("body.0", "weight")


@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        _FabricModule,
        compiled,
        lambda m: DistributedDataParallel(compiled(m)),
        lambda m: _FabricModule(DistributedDataParallel(m)),
    ],
)
def test_wrappers_leave_no_trace_in_names(names, wrap):
    net = Net()
    wrapped = wrap(net)
    assert unwrap(wrapped) is net
    outer = names.place(wrapped, None)
    assert (outer.root, outer.module, outer.module_class, outer.is_wrapper) == ("Net#0", "", "Net", True)
    assert names.place(net.body[1], outer).module == "body.1"
    assert not names.place(net, outer).is_wrapper
    assert names.parameter(net.head.bias)[0].module == "head"
    assert [name for name, _ in names.roots["Net#0"].modules] == ["", "body", "body.0", "body.1", "head"]


def test_a_model_wrapped_after_its_first_use_keeps_its_root(names):
    net = Net()
    before = names.place(net, None)
    wrapped = DistributedDataParallel(net)
    assert names.place(wrapped, None).root == before.root == "Net#0"
    assert list(names.roots) == ["Net#0"]


def test_wrapped_blocks_inside_a_model(names):
    net = Net()
    net.body[0] = checkpoint_wrapper(net.body[0])
    names.place(net, None)
    assert names.parameter(net.body[0]._checkpoint_wrapped_module.weight)[0].module == "body.0"


def test_a_child_called_module_is_no_wrapper(names):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    plain = Plain()
    names.place(plain, None)
    assert names.place(plain.module, None).module == "module"


def test_a_part_called_alone_belongs_to_the_model_it_is_in(names):
    net = Net()
    place = names.place(net.body, None)
    assert (place.root, place.module) == ("Net#0", "body")


def test_a_root_that_becomes_part_of_a_model_takes_its_parameters_along(names):
    net = Net()
    names.place(net, None)
    whole = nn.ModuleDict({"backbone": net, "extra": nn.Linear(2, 2)})
    names.place(whole, None)
    assert names.place(net.head, None).module == "backbone.head"
    place, _ = names.parameter(net.head.weight)
    assert (place.root, place.module) == ("ModuleDict#0", "backbone.head")


def test_loss_modules_made_anew_share_one_name_and_do_not_rewrite_the_facts(names):
    versions = set()
    for _ in range(5):
        criterion = nn.MSELoss()
        assert names.place(criterion, None).root == "MSELoss#0"
        names.roots["MSELoss#0"].trained = True
        versions.add(names.version)
        del criterion
        gc.collect()
    assert len(versions) == 1
    assert names.roots["MSELoss#0"].trained and not names.roots["MSELoss#0"].parametric


def test_an_average_of_a_model_is_another_root(names):
    net = Net()
    names.place(net, None)
    assert names.place(copy.deepcopy(net), None).root == "Net#1"


def test_modules_outside_the_tree_are_named_after_their_class(names):
    net = Net()
    root = names.place(net, None)
    assert names.place(nn.Softmax(-1), root, net).module == "Softmax"
    assert names.place(nn.Softmax(-1), names.place(net.body, None), net.body).module == "body.Softmax"


def test_modules_put_into_the_tree_later_get_their_true_name(names):
    net = Net()
    root, version = names.place(net, None), names.version
    net.head = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert names.place(net.head[1], root, net).module == "head.1"
    assert names.search_parameter(net.head[0].weight)[0].module == "head.0"
    assert names.version > version


def test_replaced_parameters_are_found_again(names):
    net = Net()
    names.place(net, None)
    net.head.weight = nn.Parameter(torch.zeros(2, 4))
    assert names.parameter(net.head.weight) is None
    assert names.search_parameter(net.head.weight)[1] == "weight"


def test_searching_has_an_end(names, monkeypatch):
    """A script that makes modules in its loop does not pay for a walk over all objects each time."""
    scans = []
    monkeypatch.setattr(live_objects, "instances", lambda kind: scans.append(1) or [])
    kept = [nn.Linear(2, 2) for _ in range(100)]
    for module in kept:
        names.place(module, None)
    assert len(scans) == 16
    assert names.place(kept[-1], None).root == "Linear#99"


def test_a_module_with_a_length_or_without_children_is_a_module(names):
    assert names.place(nn.ModuleList(), None).root == "ModuleList#0"


def test_fsdp_classes_are_called_what_the_user_called_them():
    class FSDPModule:
        pass

    sharded = nn.Linear(2, 2)
    sharded.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert class_name(sharded) == "Linear"
    assert class_name(nn.Linear(2, 2)) == "Linear"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # the class differs by release
@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
        lambda: nn.Sequential(shared := nn.Linear(2, 2), nn.Sequential(nn.ReLU(), shared)),
    ],
    ids=["shared", "transformer", "scripted", "nested"],
)
def test_the_parts_of_a_module_are_its_modules_in_their_order(make):
    module = make()

    assert list(map(id, static.modules(module))) == list(map(id, module.modules()))


def test_places_are_equal_and_hash_alike_by_what_they_say():
    one, same, other = Place("A#0", "fc", "Linear"), Place("A#0", "fc", "Linear"), Place("A#0", "fc", "Conv2d")

    assert one == same
    assert hash(one) == hash(one) == hash(same)
    assert one != other
    assert {one: 1}[same] == 1
