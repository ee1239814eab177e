"""The layout of a model over the ranks: this rank's index in each dimension, and the ranks with the same parameters.

Read from the objects of torch, Megatron and DeepSpeed. Nothing here communicates, and nothing is imported.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from precdoctor.recording.kernels import apart_from_user_modes
from precdoctor.recording.model import live_objects, static
from precdoctor.recording.process import attach

#: Maximum number of each that is recorded; a model has a handful.
_MAX_DIMENSIONS, _MAX_PLACEMENTS, _MAX_STAGES = 16, 256, 64
#: Maximum searches for meshes and stages: each visits every live object.
_MAX_SEARCHES = 8
#: Maximum characters of the error message if reading fails.
_MAX_WHY = 400
#: Getters of a dimension's rank and size, without their ``_rank`` and ``_world_size``, by module.
_GETTERS: Mapping[str, Mapping[str, str]] = {
    "megatron.core.parallel_state": {
        "tp": "get_tensor_model_parallel",
        "pp": "get_pipeline_model_parallel",
        "dp": "get_data_parallel",
        "cp": "get_context_parallel",
        "ep": "get_expert_model_parallel",
    },
    # Getters with a leading underscore are not used: they may create groups, which is a collective.
    "deepspeed.utils.groups": {"tp": "get_tensor_model_parallel", "dp": "get_data_parallel"},
}
#: Placement of a DTensor along a dimension of its mesh, by class name.
_SHARDED, _REPLICATED = ("Shard", "_StridedShard"), "Replicate"
#: A communication hook under which replicas differ between two averagings of the weights.
_LOCAL_STEPS = "post_localSGD"


#: Class names of wrappers: DeepSpeed's engines; Megatron's, which has the name of torch's.
_ENGINES, _REPLICATING = ("DeepSpeedEngine", "PipelineEngine"), "DistributedDataParallel"
#: The stage of ZeRO from which weights are sharded.
_SHARDED_WEIGHTS = 3


class Layout:
    """Collects dimensions and placements for one rank.json."""

    def __init__(self) -> None:
        distributed = sys.modules["torch.distributed"]
        self._rank, self._ranks = int(distributed.get_rank()), int(distributed.get_world_size())
        #: By name: size, this rank's index, and the ranks of the dimension, empty if unknown.
        self._dimensions: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self._placements: list[dict[str, Any]] = []
        self._grids: dict[int, tuple[np.ndarray, tuple[int, ...], tuple[str, ...]] | None] = {}
        #: Keeps the meshes alive, whose ids are keys of ``_grids``.
        self._meshes: list[Any] = []

    # --- dimensions --------------------------------------------------------------------------------------------------

    def _dimension(self, name: str, ranks: Sequence[int]) -> str:
        """Add a dimension with these ranks; return its name: that of one with the same ranks, else an unused one."""
        ranks = tuple(ranks)
        if self._dimensions.get(name) == (len(ranks), ranks.index(self._rank), ()):  # a library has already named it
            self._dimensions[name] = len(ranks), ranks.index(self._rank), ranks
        for known, (_, _, others) in self._dimensions.items():
            if others == ranks and (known == name or len(ranks) > 1):
                return known
        free, n = name, 1
        while free in self._dimensions:
            free, n = f"{name}#{n}", n + 1
        if len(self._dimensions) < _MAX_DIMENSIONS:
            self._dimensions[free] = len(ranks), ranks.index(self._rank), ranks
        return free

    def grid(self, mesh: Any) -> tuple[np.ndarray, tuple[int, ...], tuple[str, ...]] | None:
        """Return the ranks of a device mesh, this rank's index in it, and the names of its dimensions.

        Adds dimensions that have no name yet. None if ``mesh`` is no device mesh of torch, or does not contain this
        rank.
        """
        if id(mesh) not in self._grids:
            self._meshes.append(mesh)
            self._grids[id(mesh)] = self._read_grid(mesh)
        return self._grids[id(mesh)]

    def _read_grid(self, mesh: Any) -> tuple[np.ndarray, tuple[int, ...], tuple[str, ...]] | None:
        if type(mesh) is not _mesh_class():
            return None
        with apart_from_user_modes():
            ranks = mesh.mesh.numpy()
        found = np.argwhere(ranks == self._rank)
        if len(found) != 1:
            return None
        place = tuple(int(n) for n in found[0])
        names = mesh.mesh_dim_names or tuple(f"dim{n}" for n in range(ranks.ndim))
        along = [np.moveaxis(ranks, n, -1)[place[:n] + place[n + 1 :]].tolist() for n in range(ranks.ndim)]
        return ranks, place, tuple(self._dimension(static.text(n), r) for n, r in zip(names, along, strict=True))

    def libraries(self) -> None:
        """Add the dimensions that Megatron and DeepSpeed know, unless a mesh has named them."""
        for library, getters in _GETTERS.items():
            module = sys.modules.get(library)
            for name, getter in getters.items() if module is not None else ():
                size, rank = _getter_result(module, f"{getter}_world_size"), _getter_result(module, f"{getter}_rank")
                if size is not None and rank is not None and name not in self._dimensions:
                    self._dimensions[name] = size, rank, ()

    # --- placements --------------------------------------------------------------------------------------------------

    def of_dtensor(self, parameter: Tensor) -> int | None:
        """Return the number of a DTensor's placement; None if it is unknown, or holds partial sums."""
        spec = static.attribute(parameter, "_spec")
        grid = self.grid(static.attribute(spec, "mesh"))
        kinds = [type(p).__name__ for p in static.elements(static.attribute(spec, "placements"))]
        if grid is None or len(kinds) != len(grid[1]) or not {*kinds} <= {*_SHARDED, _REPLICATED}:
            return None
        ranks, place, names = grid
        same = ranks[tuple(slice(None) if k == _REPLICATED else n for k, n in zip(kinds, place, strict=True))]
        split = [n for n, k in zip(names, kinds, strict=True) if k != _REPLICATED]
        return self._placement("DTensor", same.reshape(-1).tolist(), [n for n in names if n not in split], split)

    def of_ddp(self, wrapper: nn.Module) -> int | None:
        """Return the number of the placement of DistributedDataParallel's parameters; None if replicas may differ."""
        hooks = static.elements(static.attribute(wrapper, "_comm_hooks"))
        ranks = _ranks_of(static.attribute(wrapper, "process_group"))
        if self._rank not in ranks:
            return None
        dimension = self._dimension("dp", ranks)
        if any(type(h[0]) is FunctionType and _LOCAL_STEPS in h[0].__name__ for h in hooks):
            return None
        return self._placement("DistributedDataParallel", ranks, [dimension], [])

    def of_library(self, wrapper: nn.Module) -> tuple[int | None, int | None]:
        """Return placement numbers for a DeepSpeed engine, or Megatron's DistributedDataParallel; None if unknown.

        The second one is for Megatron's tensor parallel weights; None if the first holds for them also.
        """
        kind = type(wrapper).__name__
        group = static.attribute(wrapper, "dp_cp_group" if kind == _REPLICATING else "data_parallel_group")
        ranks = _ranks_of(group)
        if self._rank not in ranks:
            return None, None
        stage = static.attribute(static.attribute(wrapper, "_config"), "zero_optimization_stage")
        if stage is not None and static.number(stage) == _SHARDED_WEIGHTS:
            alone = self._placement(kind, [self._rank], [], [self._dimension("dp", ranks)])
            return alone, alone
        over = [self._dimension("dp", ranks)]
        split = ["tp"] if self._dimensions.get("tp", (1,))[0] > 1 else []
        return self._placement(kind, ranks, over, []), self._placement(kind, ranks, over, split) if split else None

    def of_fsdp1(self, wrapper: nn.Module) -> int | None:
        """Return the number of the placement of FullyShardedDataParallel's parameters; None if unknown."""
        strategy = getattr(static.attribute(wrapper, "sharding_strategy"), "name", "")
        inner = _ranks_of(static.attribute(wrapper, "process_group"))
        if self._rank not in inner:
            return None
        if strategy == "NO_SHARD":
            return self._placement("FullyShardedDataParallel", inner, [self._dimension("dp", inner)], [])
        if "HYBRID" not in strategy:
            return self._placement("FullyShardedDataParallel", [self._rank], [], [self._dimension("shard", inner)])
        outer = _ranks_of(static.attribute(wrapper, "_inter_node_pg"))
        if self._rank not in outer:
            return None
        replicated, split = self._dimension("replicate", outer), self._dimension("shard", inner)
        return self._placement("FullyShardedDataParallel", outer, [replicated], [split])

    def _placement(self, by: str, same: Sequence[int], replicated: list[str], sharded: list[str]) -> int | None:
        """Return the number of a placement, which is added if it is new; None if there are too many."""
        placement = {
            "by": by, "replicated": replicated, "sharded": sharded, "first": min(same), "replicas": len(same),
        }  # fmt: skip
        if placement not in self._placements:
            if len(self._placements) >= _MAX_PLACEMENTS:
                return None
            self._placements.append(placement)
        return self._placements.index(placement)

    def document(self, stages: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the content of rank.json under ``layout``.

        Args:
            stages: pipeline stages of this rank: index, and number of stages.
        """
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        dimensions = [{"name": n, "size": size, "rank": at} for n, (size, at, _) in self._dimensions.items()]
        return {
            "ranks": self._ranks,
            "restart": int(restart) if restart.isdecimal() else None,
            "dimensions": dimensions,
            "stages": [index for index, _ in stages],
            "stage_count": max((count for _, count in stages), default=None),
            "placements": self._placements,
        }


class LayoutReader:
    """Reads the layout of a process, anew for each rank.json."""

    def __init__(self) -> None:
        self._searches = 0
        self._meshes: list[weakref.ref[Any]] = []
        self._stages: list[tuple[int, int]] = []
        self._last: tuple[dict[str, Any] | None, dict[int, int]] = None, {}

    def read(self, models: Sequence[nn.Module]) -> tuple[dict[str, Any] | None, dict[int, int]]:
        """Return the layout (None without other ranks), and by ``id`` of a parameter the number of its placement.

        After the process group is destroyed, the last result is returned. If reading fails, the layout has only
        ``failed``, the error.

        Args:
            models: the top-level modules as they are called, wrappers included.
        """
        if not attach.has_other_ranks():
            return self._last
        try:
            self._last = self._read(models)
        except Exception as error:  # noqa: BLE001 - another torch may keep it elsewhere; the rest of rank.json is valid
            attach.let_through(error)
            self._last = {"failed": f"{type(error).__name__}: {error}"[:_MAX_WHY]}, {}
        return self._last

    def _read(self, models: Sequence[nn.Module]) -> tuple[dict[str, Any], dict[int, int]]:
        if self._searches < _MAX_SEARCHES:
            self._searches += 1
            self._meshes, self._stages = [weakref.ref(m) for m in _meshes()], _stages()
        layout = Layout()
        # Meshes of parameters first: another mesh may be a leftover.
        parameters = {id(p): p for model in models for p in static.parameters(model) if type(p).__name__ == "DTensor"}
        sharded = {key: layout.of_dtensor(p) for key, p in parameters.items()}
        for mesh in self._meshes:
            layout.grid(mesh())
        layout.libraries()
        placements: dict[int, int | None] = {}
        for model in models:
            placements |= _wrapper_placements(layout, model)
        placements |= sharded
        known = {key: number for key, number in placements.items() if number is not None}
        return layout.document(self._stages), known


def _wrapper_placements(layout: Layout, model: nn.Module) -> dict[int, int | None]:
    """Return the placement number of each parameter that a wrapper in ``model`` manages, by ``id``."""
    found: dict[int, int | None] = {}
    ddp_class = nn.parallel.DistributedDataParallel
    fsdp_class = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for part in static.modules(model):  # inner wrappers come later, and override
        kind = type(part)
        if kind is ddp_class and (inner := static.held(part, "_modules").get("module")) is not None:
            number, ignored = layout.of_ddp(part), static.attribute(part, "parameters_to_ignore")
            ignored = {n for n in ignored if type(n) is str} if type(ignored) is set else set()
            found |= {id(p): number for name, p in static.named_parameters(inner) if name not in ignored}
        elif kind.__name__ in _ENGINES or (kind.__name__ == _REPLICATING and kind.__module__.startswith("megatron.")):
            whole, part_of_it = layout.of_library(part)
            for p in static.parameters(part):
                own = static.own(p)
                if own.get("allreduce") is not False:  # experts are reduced over other ranks
                    found[id(p)] = part_of_it if own.get("tensor_model_parallel") is True and part_of_it else whole
        elif kind is fsdp_class:
            number = layout.of_fsdp1(part)
            found |= {id(p): number for p in static.parameters(part)}
    return found


def _mesh_class() -> Any:
    return getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)


def _meshes() -> list[Any]:
    """Return device meshes of several named dimensions, most dimensions first; others are found through parameters."""
    kind = _mesh_class()
    found: list[Any] = live_objects.exactly(kind) if isinstance(kind, type) else []
    return sorted((m for m in found if m.ndim > 1 and m.mesh_dim_names), key=lambda m: -m.ndim)


def _stages() -> list[tuple[int, int]]:
    """Return index and total number of the pipeline stages of this process."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    stages: list[Any] = []
    for name in ("PipelineStage", "_PipelineStage"):
        kind: Any = getattr(module, name, None)
        stages += live_objects.exactly(kind) if isinstance(kind, type) else []
    found = {(static.attribute(s, "stage_index"), static.attribute(s, "num_stages")) for s in stages}
    return sorted((at, of) for at, of in found if type(at) is int and type(of) is int)[:_MAX_STAGES]


def _ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group of torch; empty for any other group, or a destroyed one."""
    distributed = sys.modules["torch.distributed"]
    if not type(group).__module__.startswith("torch."):
        return []
    try:
        return [int(r) for r in distributed.get_process_group_ranks(group)]
    except (KeyError, ValueError, RuntimeError) as error:  # the group was destroyed
        attach.let_through(error)
        return []


def _getter_result(module: Any, getter: str) -> int | None:
    """Return the result of a library's getter; None if it fails or returns no natural number."""
    function = vars(module).get(getter)
    if type(function) is not FunctionType:
        return None
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - the library's groups do not exist
        attach.let_through(error)
        return None
    return found if type(found) is int and found >= 0 else None
