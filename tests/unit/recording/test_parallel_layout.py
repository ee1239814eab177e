"""The parallel layout, as far as one process can tell: libraries that are not here, groups that are gone."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from precdoctor.recording.output import parallel_layout
from precdoctor.recording.output.parallel_layout import LayoutReader
from precdoctor.recording.process import attach


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A process group of this process alone that the reader takes for one of several."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it for good
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    monkeypatch.setattr(attach, "has_other_ranks", dist.is_initialized)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def library(monkeypatch, name: str, source: str) -> None:
    """A module that is loaded, with these functions."""
    module = ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)


MEGATRON = """
def get_tensor_model_parallel_rank(): return 1
def get_tensor_model_parallel_world_size(): return 2
def get_pipeline_model_parallel_rank(): return 3
def get_pipeline_model_parallel_world_size(): return 4
def get_data_parallel_rank(with_context_parallel=False): return 5
def get_data_parallel_world_size(with_context_parallel=False): return 8
def get_context_parallel_rank(): assert False, "context parallel group is not initialized"
get_context_parallel_world_size = get_context_parallel_rank
def get_expert_model_parallel_rank(): return 0
def get_expert_model_parallel_world_size(): return 1
"""
DEEPSPEED = """
calls = []
def get_tensor_model_parallel_rank(): return 1
def get_tensor_model_parallel_world_size(): return 2
def get_data_parallel_rank(): raise AssertionError("data parallel group is not initialized")
def get_data_parallel_world_size(): raise AssertionError("data parallel group is not initialized")
def _get_data_parallel_rank(): calls.append("a group is made, which is a collective")
def _get_expert_parallel_rank(name): calls.append("the same")
"""


def dimensions() -> dict[str, tuple[int, int]]:
    document, _ = LayoutReader().read([])
    assert document is not None
    return {d["name"]: (d["rank"], d["size"]) for d in document["dimensions"]}


def test_megatron_names_the_dimensions_whose_groups_are_there(group, monkeypatch):
    library(monkeypatch, "megatron.core.parallel_state", MEGATRON)
    assert dimensions() == {"tp": (1, 2), "pp": (3, 4), "dp": (5, 8), "ep": (0, 1)}


def test_deepspeed_is_asked_for_nothing_that_makes_a_group(group, monkeypatch):
    library(monkeypatch, "deepspeed.utils.groups", DEEPSPEED)
    assert dimensions() == {"tp": (1, 2)}
    assert sys.modules["deepspeed.utils.groups"].calls == []


@pytest.mark.parametrize("answer", ["'1'", "-1", "None", "True", "1.0"])
def test_an_answer_that_is_no_rank_is_left_out(group, monkeypatch, answer):
    source = (
        f"def get_tensor_model_parallel_rank(): return {answer}\ndef get_tensor_model_parallel_world_size(): return 2"
    )
    library(monkeypatch, "megatron.core.parallel_state", source)
    assert dimensions() == {}


def test_what_was_read_stands_when_the_group_is_gone(group):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    reader = LayoutReader()
    before = reader.read([model])
    assert before[0] is not None
    assert before[0]["dimensions"] == [{"name": "dp", "size": 1, "rank": 0}]
    assert [before[1][id(p)] for p in model.parameters()] == [0, 0]
    dist.destroy_process_group()
    assert reader.read([model]) == before


def test_replicas_that_take_local_steps_are_not_held_to_be_equal(group):
    """Under this hook gradients are averaged within a node alone, and weights now and then."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(PostLocalSGDState(None, None, start_localSGD_iter=1), post_localSGD_hook)
    layout, placed = LayoutReader().read([model])
    assert placed == {} and layout is not None
    assert [d["name"] for d in layout["dimensions"]] == ["dp"], "so that nobody takes them for ranks without a wrapper"


def test_a_group_that_is_not_of_torch_is_asked_for_nothing(group):
    class Managed(dist.ProcessGroup):
        def __hash__(self) -> int:
            raise AssertionError("code of others ran")

    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model.process_group = Managed(0, 1)
    assert LayoutReader().read([model])[1] == {}


def test_meshes_and_stages_are_searched_for_a_few_times_only(group, monkeypatch):
    searches = []
    monkeypatch.setattr(parallel_layout.live_objects, "exactly", lambda kind: searches.append(kind) or [])
    reader = LayoutReader()
    for _ in range(50):
        reader.read([])
    assert 0 < len(searches) <= 24


def test_a_layout_that_cannot_be_read_costs_the_layout_alone(group, monkeypatch):
    def elsewhere(*_):
        raise AttributeError("_spec")

    monkeypatch.setattr(parallel_layout.Layout, "of_ddp", elsewhere)
    assert LayoutReader().read([DistributedDataParallel(torch.nn.Linear(2, 1))]) == (
        {"failed": "AttributeError: _spec"},
        {},
    )


def test_a_process_that_is_alone_has_no_layout():
    assert LayoutReader().read([torch.nn.Linear(2, 1)]) == (None, {})


def placements(model: torch.nn.Module) -> tuple[list[dict], list[dict | None]]:
    """Dimensions, and the placement of each parameter."""
    document, numbers = LayoutReader().read([model])
    assert document is not None
    found = [numbers.get(id(p)) for p in model.parameters()]
    return document["dimensions"], [None if n is None else document["placements"][n] for n in found]


@pytest.mark.parametrize(("stage", "replicated", "sharded"), [(1, ["dp"], []), (2, ["dp"], []), (3, [], ["dp"])])
def test_weights_of_a_deepspeed_engine(group, stage, replicated, sharded):
    class DeepSpeedEngine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.data_parallel_group = torch.nn.Linear(2, 1), dist.group.WORLD
            self._config = type("Config", (), {})()
            self._config.zero_optimization_stage = stage

    engine = DeepSpeedEngine()
    engine.module.bias.allreduce = False  # an expert's
    dimensions, (weight, bias) = placements(engine)
    assert [(d["name"], d["rank"], d["size"]) for d in dimensions] == [("dp", 0, 1)]
    assert weight is not None and bias is None
    assert (weight["by"], weight["replicated"], weight["sharded"]) == ("DeepSpeedEngine", replicated, sharded)


def test_weights_of_megatron_that_are_tensor_parallel_are_split(group, monkeypatch):
    source = """
def get_tensor_model_parallel_rank(): return 1
def get_tensor_model_parallel_world_size(): return 2
def get_data_parallel_rank(): return 0
def get_data_parallel_world_size(): return 1
"""
    library(monkeypatch, "megatron.core.parallel_state", source)

    class Replicas(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.dp_cp_group = torch.nn.Linear(2, 1), dist.group.WORLD

    Replicas.__name__, Replicas.__module__ = "DistributedDataParallel", "megatron.core.distributed"
    model = Replicas()
    model.module.weight.tensor_model_parallel = True
    dimensions, (weight, bias) = placements(model)
    assert {d["name"]: (d["rank"], d["size"]) for d in dimensions} == {"tp": (1, 2), "dp": (0, 1)}
    assert weight is not None and bias is not None
    assert (weight["replicated"], weight["sharded"]) == (["dp"], ["tp"])
    assert (bias["replicated"], bias["sharded"]) == (["dp"], [])
