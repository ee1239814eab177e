"""Finds the tensors in arguments and results of modules, and the plain tensor to read for any tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from precdoctor.recording.model import static
from precdoctor.recording.model.containers import Opened, hides, names, opened

_LAZY = (UninitializedParameter, UninitializedBuffer)
EXACT: Final = static.TENSORS
_BASE: Any = torch._C.TensorBase
_FLOATS, _NUMEL, _STORAGE = _BASE.is_floating_point, _BASE.numel, _BASE.untyped_storage
_NEGATED: Any = _BASE.is_neg
_NESTED, _META, _LAYOUT = _BASE.is_nested.__get__, _BASE.is_meta.__get__, _BASE.layout.__get__
#: A context in which no ``__torch_function__`` of a subclass runs.
_without_its_code: Final = torch._C.DisableTorchFunctionSubclass
_NBYTES: Final = torch.UntypedStorage.nbytes
#: Whether a tensor stands for a batch of tensors in ``torch.autograd.grad(..., is_grads_batched=True)`` and in
#: ``torch.autograd.functional.jacobian(..., vectorize=True)``, which are no functorch transforms.
is_batched: Final[Callable[[Tensor], bool]] = torch._C._functorch.is_legacy_batchedtensor
_MAX_DEPTH = 3
_MAX_LEAVES = 64
#: Most containers opened for one value.
_MAX_CONTAINERS = 256
#: Limits of :func:`mapped`, larger because a tensor that is not replaced remains the run's own.
_MAX_NEST, _MAX_MAPPED = 8, 4096
#: Types of most values that hold no tensor.
_ATOMS = frozenset((type(None), str, bytes, int, float, bool, torch.dtype, torch.device, torch.Size, slice))


def tensors(value: Any, *, objects: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Iterate over tensors in nested tuples, lists, mappings and dataclasses, with dotted names (``hidden_states.3``).

    A lone tensor has the name "". At most three levels deep and 64 tensors: caches and graphs are not outputs. No
    code of the user's runs. An attribute in which a class stores its elements is no level and has no name.

    Args:
        value: arguments or results.
        objects: open objects of any class with attributes as well: the arguments of a top-level module.
    """
    walk = _Walk(_MAX_DEPTH, _MAX_CONTAINERS, objects=objects)
    return itertools.islice(walk.within(value, "", 0, ()), _MAX_LEAVES)


def floating(value: Any, *, objects: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the floating-point and complex tensors among :func:`tensors` that can be read now.

    None inside functorch transforms: a tensor there has values only once the transform runs.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return iter(())
    if type(value) is Tensor:  # the usual case
        return iter((("", value),) if counts(value) else ())
    if type(value) is dict and len(value) == 1:  # the usual case of arguments
        ((name, x),) = value.items()
        if type(x) is Tensor:
            return iter(((static.text(name), x),) if counts(x) else ())
    return ((name, x) for name, x in tensors(value, objects=objects) if counts(x))


def mapped(value: Any, change: Callable[[Tensor], Tensor], *, objects: bool = False) -> Any:
    """Return the same nest with every tensor replaced, also those too deep for :func:`tensors`.

    Containers are rebuilt with their other contents by reference, and without running their code. A container that
    cannot be rebuilt stays as it is, with its tensors.
    """
    return _Walk(_MAX_NEST, _MAX_MAPPED, objects=objects).mapped(value, change, 0, ())


class _Walk:
    """One walk through a nest, bounded in depth and number of containers; follows no container inside itself."""

    def __init__(self, depth: int, containers: int, *, objects: bool) -> None:
        self._depth = depth
        self._containers_left = containers
        self._objects = objects
        #: Number of tensors that :meth:`mapped` has met.
        self._tensors_met = 0

    def within(self, value: Any, name: str, depth: int, inside: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors in a value, with names."""
        kind = type(value)
        if issubclass(kind, Tensor):
            yield name, value
            return
        found = self._opened(value, kind, depth, inside)
        if found is None:
            return
        inside = (*inside, id(value))
        for (key, item), word in zip(found.items.items(), names(found), strict=True):
            if hides(found, key) and not issubclass(type(item), Tensor):
                yield from self.within(item, name, depth, inside)
            else:
                yield from self.within(item, f"{name}.{word}" if name else word, depth + 1, inside)

    def mapped(self, value: Any, change: Callable[[Tensor], Tensor], depth: int, inside: tuple[int, ...]) -> Any:
        """Return the value with its tensors replaced; itself if nothing changes."""
        kind = type(value)
        if issubclass(kind, Tensor):
            self._tensors_met += 1
            return change(value)
        found = self._opened(value, kind, depth, inside)
        if found is None:
            return value
        inside, changed, met = (*inside, id(value)), {}, self._tensors_met
        for key, item in found.items.items():
            new = self.mapped(item, change, depth if hides(found, key) else depth + 1, inside)
            if new is not item:
                changed[key] = new
        # Lists, dictionaries and objects with tensors are always copied, because the run may write to them.
        again = kind is dict or kind is list or (found.is_object and self._tensors_met > met)
        return found.remade(changed) if changed or again else value

    def _opened(self, value: Any, kind: type, depth: int, inside: tuple[int, ...]) -> Opened | None:
        """Open a container, unless it is too deep, inside itself, or one too many."""
        if kind in _ATOMS or depth >= self._depth or len(inside) > 2 * self._depth or self._containers_left <= 0:
            return None
        if id(value) in inside:
            return None
        self._containers_left -= 1
        return opened(value, objects=self._objects)


def counts(x: Tensor) -> bool:
    """Return whether a tensor has floating-point or complex elements."""
    if type(x) not in EXACT:
        with _without_its_code():
            return x.is_floating_point() or x.is_complex()
    return x.is_floating_point() or x.is_complex()


def buffer_stamp(owner: torch.nn.Module, name: str, buffer: Tensor) -> object:
    """Return a value that differs once the buffer has been written to or replaced.

    Batch norm's kernels do not raise the version counter of running statistics: in training their stamps always differ.
    """
    if name in ("running_mean", "running_var") and static.is_training(owner):
        return object()
    return buffer._cdata, buffer._version


def version(x: Tensor) -> int:
    """Return the number of writes to a tensor's memory; -1 for inference tensors, which do not count them."""
    if type(x) not in EXACT:
        with _without_its_code():
            # A lazy module's parameter has no shape before the first call, and raises at almost any question.
            return -1 if isinstance(x, _LAZY) or x.is_inference() else x._version
    return -1 if x.is_inference() else x._version


def is_transformed(x: Tensor) -> bool:
    """Return whether ``x`` stands for another tensor in a functorch transform, and has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_wrapped(x: Tensor) -> bool:
    """Return whether ``x`` has no memory of its own: it is batched, or of a subclass that runs its own ops.

    Such subclasses are DTensor, FakeTensor, quantised tensors.
    """
    return computes_itself(type(x)) or is_batched(x)


def is_strided(x: Tensor) -> bool:
    """Return whether ``x`` has strides and memory of its own."""
    return x.layout is torch.strided and not is_wrapped(x)


def computes_itself(kind: type) -> bool:
    """Return whether tensors of this type run their own ops, by a ``__torch_dispatch__`` of their own."""
    if kind in EXACT:
        return False
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not Tensor.__torch_dispatch__


def all_plain(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return :func:`plain` of each tensor, without those for which it is None.

    Usually all are plain already. C functions test that, because this runs in every step.
    """
    if torch._C._functorch.maybe_current_level() is None and (
        EXACT.issuperset(map(type, tensors))
        and all(map(_FLOATS, tensors))
        and not any(map(_NESTED, tensors))
        and not any(map(_NEGATED, tensors))
        and not any(map(_META, tensors))
        and {torch.strided}.issuperset(map(_LAYOUT, tensors))
        and all(map(_NUMEL, tensors))
        and all(map(_NBYTES, map(_STORAGE, tensors)))
    ):
        return tensors
    return [found for x in tensors if (found := plain(x)) is not None]


def plain(x: Tensor) -> Tensor | None:
    """Return the dense floating-point tensor with the values of ``x``; None if there is none.

    For a DTensor its local shard, for a sparse tensor its coalesced values, for a complex one real and imaginary parts.
    None for integers, fake, functorch-wrapped, batched, quantised, nested, meta, lazy and empty tensors, subclasses
    with ops of their own, and missing memory, because reading that crashes: FSDP empties the storage of gathered
    parameters, and zero tangents of forward-mode differentiation have none.
    """
    if type(x) not in EXACT:
        with _without_its_code():
            return _plain_of_subclass(x)
    if torch._C._functorch.maybe_current_level() is not None or is_batched(x):
        return None
    if x.layout is not torch.strided:
        if x.layout is not torch.sparse_coo:
            return None
        x = _added_up(x.detach())
    if x.is_meta or x.is_nested or x.numel() == 0 or x._is_zerotensor() or x.untyped_storage().nbytes() == 0:
        return None
    if x.dtype.is_complex:
        x = torch.view_as_real(x.detach().resolve_conj())
    elif x.is_neg():  # the imaginary part of a conjugate: memory holds its negative
        x = x.detach().resolve_neg()
    return x if x.dtype.is_floating_point else None


def plain_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter if it is a dense tensor of torch's own class with a version counter."""
    grad = parameter.grad
    return grad if grad is not None and not grad.is_inference() and plain(grad) is grad else None


def _plain_of_subclass(x: Tensor) -> Tensor | None:
    if is_wrapped(x):
        local: Any = static.attribute(x, "_local_tensor")
        if type(x).__name__ != "DTensor" or not issubclass(type(local), Tensor):
            return None
        x = local
    if type(x) in EXACT:
        return plain(x)
    if isinstance(x, _LAZY) or torch._C._functorch.maybe_current_level() is not None:
        return None
    # A subclass may answer with its own code, so a plain tensor on the same memory is asked instead.
    return plain(x.detach().as_subclass(Tensor))


def _added_up(x: Tensor) -> Tensor:
    """Return the values of a sparse tensor, summed per place, without ``coalesce``, which may warn."""
    indices, values = x._indices(), x._values()
    if x.is_coalesced() or not values.numel():
        return values
    places = torch.zeros_like(indices[0])
    for size, along in zip(x.shape, indices, strict=False):
        places = places * size + along
    distinct, inverse = places.unique(return_inverse=True)
    return values.new_zeros((len(distinct), *values.shape[1:])).index_add_(0, inverse, values)
