"""What is kept of a call of a top-level module, for a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.first_call import FirstCall, TopLevel
from precdoctor.recording.scene.state_restore import Autocast, RandomState

if TYPE_CHECKING:
    from precdoctor.recording.scene.loss_graph import LossGraph


@dataclass(eq=False)
class RootCall:
    """One call of a top-level module in training."""

    module: nn.Module
    root: str
    micro_step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Name, tensor and version counter at the call of each tensor leaf of the arguments.
    versions: list[tuple[str, Tensor, int]]
    random: RandomState
    autocast: tuple[Autocast, ...]
    #: Whether the module has parameters; loss modules have none.
    parametric: bool
    #: Source line of the call in the user's code.
    line: Line | None
    #: Whether ``module`` is a copy of the user's module, which must not be kept alive.
    stand_in: bool = False
    #: Whether gradients were off: a custom autograd function (the adjoint of an ODE) computes them itself.
    without_gradients: bool = False
    #: In ``torch.func.functional_call``: the tensors used in place of the parameters, by name.
    bound: Mapping[str, Tensor] = field(default_factory=dict)
    #: Names in ``bound`` whose tensors the step has computed: by an inner loop, or a network that outputs weights.
    computed: frozenset[str] = frozenset()
    #: Buffers that forward passes write to: copies from before the call, by ``id`` of the buffer.
    buffers: Mapping[int, Tensor] = field(default_factory=dict)
    #: Names of parameters that forward passes write to; the state before the module's first call, if this was it.
    writes: frozenset[str] = frozenset()
    first: FirstCall | None = None
    #: On later calls: copies of the parameters named in ``writes``, from before the call.
    before: Mapping[str, Tensor] = field(default_factory=dict)
    #: Output leaves with their version counters, and the gradients that ``backward`` computed for them, by name.
    outputs: list[tuple[str, Tensor, int]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    #: Whether it has returned: false while it runs, and if it raised.
    returned: bool = False
    #: Outputs whose gradient did not fit into the scene memory; a replay of the loss code may compute it again.
    lost: set[str] = field(default_factory=set)
    #: Output gradients in each call of ``torch.autograd.grad``, by the number of that call in the step.
    grad_call_gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    #: Autograd node behind each output: its sequence number, and the index of the output among the node's outputs.
    makers: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Graphs of the arguments that code between another top-level module and this call has computed.
    graphs: list[LossGraph] = field(default_factory=list)
    #: Facts about the module that hold for all its calls.
    top_level: TopLevel | None = None
    #: Objects other than modules whose attributes a replay may write to.
    owners: tuple[object, ...] = ()

    @property
    def prepares_data(self) -> bool:
        """Whether nothing in it is trained and no gradient reaches it, as in a torchvision transform called per sample.

        Such a call can be dropped: its result is an argument of another call and kept there.
        """
        return self.stand_in and not self.makers

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass or ``torch.autograd.grad`` has reached an output."""
        return bool(self.gradients or self.lost or self.grad_call_gradients)

    def output(self, name: str) -> Tensor | None:
        """Return the last output of this name as the run made it; None if not kept, or written to since."""
        kept = (x for own, x, version in reversed(self.outputs) if own == name and tensor_leaves.version(x) == version)
        return next(kept, None)

    @property
    def changed(self) -> list[str]:
        """Names of arguments written to since the call began."""
        return [name for name, x, version in self.versions if tensor_leaves.version(x) != version]
