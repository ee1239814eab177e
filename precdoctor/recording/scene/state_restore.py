"""Saves and restores the process state around a replay: random generators, buffers, attributes, hooks, autocast."""

from __future__ import annotations

import _random
import contextlib
import ctypes
import functools
import random
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.process import attach
from precdoctor.recording.slots.deferred import CUDA, is_capturing


def _known_to_autocast(device: str) -> bool:
    """Return whether this torch has an autocast for a type of device."""
    try:
        torch.is_autocast_enabled(device)
    except (RuntimeError, TypeError, ValueError) as error:
        attach.let_through(error)
        return False
    return True


#: Types of devices that have their own autocast.
DEVICES = tuple(filter(_known_to_autocast, ("cuda", "cpu", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu")))
#: Attributes in which ``nn.Module`` itself keeps tensors, children and hooks.
_MACHINERY = frozenset(vars(nn.Module()))
#: Containers whose tensors are set aside.
_NESTS = frozenset((list, tuple, dict))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class _Twister:
    """Reads the state of a Mersenne Twister; asks its owner for it only if the generator's memory has changed.

    Asking Python or NumPy takes 6 or 28 us; comparing 64 bytes of memory costs next to nothing.
    """

    def __init__(
        self, address: int | None, read: Callable[[], Any], normal: Callable[[Any], Any], index: int = 0
    ) -> None:
        """Take ``address``, where 624 words and an index lie in memory; None: unknown, so the owner is always asked.

        ``read`` asks the owner for the state. ``normal`` returns whether a state holds back a normal number: these come
        in pairs. Any draw changes the index and every 624th draw all words, so the index and 15 words beside it tell
        states apart.
        """
        self.address = address
        self._read, self._normal = read, normal
        self._memory = b""
        self._state: Any = None
        self._words: Any = (ctypes.c_char * _PROBED).from_address(address + index) if address is not None else None

    def now(self) -> Any:
        """Return the current state in its owner's format."""
        if self.address is None:
            return self._read()
        memory = self._words.raw
        # Drawing a normal number that was held back changes no memory: such a state must not be cached.
        if memory != self._memory:
            self._memory, self._state = memory, self._read()
            if self._normal(self._state):
                self._memory = b""
        return self._state


def _address_in_python() -> int | None:
    """Return the address of the state of :mod:`random`'s global generator; None if the layout is not as expected.

    CPython keeps it behind the object's header; a second generator is used to check that.
    """
    header = object.__basicsize__
    if sys.implementation.name != "cpython" or not 0 <= _random.Random.__basicsize__ - header - _TWISTER_BYTES < 8:
        return None
    probe = _random.Random(1)
    for _ in range(2):
        index, *words = struct.unpack("=i624I", ctypes.string_at(id(probe) + header, _TWISTER_BYTES))
        if (*words, index) != probe.getstate():
            return None
        probe.random()
    owner: Any = getattr(random.getstate, "__self__", None)
    return id(owner) + header if type(owner) is random.Random else None


_TWISTER_BYTES = 625 * 4
_PROBED = 16 * 4
_python_twister = _Twister(_address_in_python(), random.getstate, lambda state: state is None or state[2] is not None)
#: Cache of :func:`_numpy_state`: ``get_state``, the object it is bound to, that object's bit generator, its _Twister.
_numpy_cache: list[Any] = []


def _numpy_state() -> Any:
    """Return the state of NumPy's global generator; None if ``numpy.random`` is not imported."""
    module = sys.modules.get("numpy.random")
    if module is None:
        return None
    ask: Any = module.get_state
    if _numpy_cache and _numpy_cache[0] is ask and _numpy_cache[1]._bit_generator is _numpy_cache[2]:
        return _numpy_cache[3].now()
    owner: Any = getattr(ask, "__self__", None)
    generator: Any = getattr(owner, "_bit_generator", None)
    if type(generator).__name__ != "MT19937":
        return ask(legacy=False)
    address: Any = generator.ctypes.state_address
    read = functools.partial(ask, legacy=False)
    held = _Twister(address, read, lambda state: state is None or state["has_gauss"], _TWISTER_BYTES - _PROBED)
    _numpy_cache[:] = ask, owner, generator, held
    return held.now()


class RandomState(NamedTuple):
    """The states of all generators that a forward pass may draw from."""

    cpu: Tensor
    cuda: tuple[tuple[int, Tensor], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, used: Iterable[torch.device] | None = None) -> RandomState:
        """Read the states; changes none and waits for no device.

        Args:
            used: devices that may be drawn on, beside the current one; None: all that this process can see.
        """
        cuda: tuple[tuple[int, Tensor], ...] = ()
        if CUDA.get("_initialized", True) and torch.cuda.is_initialized() and not is_capturing():
            every = set(range(torch.cuda.device_count()))
            current = torch.cuda.current_device()
            devices = every if used is None else {current, *(d.index for d in used if d.type == "cuda")}
            cuda = tuple((i, torch.cuda.get_rng_state(i)) for i in sorted(devices))
        return tuple.__new__(cls, (torch.default_generator.get_state(), cuda, _python_twister.now(), _numpy_state()))

    def restore(self) -> None:
        """Set every generator to the saved state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda:
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)


@dataclass(frozen=True)
class Autocast:
    """The autocast state of one device type."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls) -> tuple[Autocast, ...]:
        """Return the autocast states of the CPU, of CUDA and of any other device type on which autocast is enabled."""
        cache = torch.is_autocast_cache_enabled()
        off = not torch._C._is_any_autocast_enabled()
        key = cache, torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
        if off and (known := _states_while_off.get(key)) is not None:  # the usual case
            return known
        devices = [d for d in DEVICES if d in {"cuda", "cpu"} or torch.is_autocast_enabled(d)]
        states = tuple(cls(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices)
        if off:
            _states_while_off[key] = states
        return states

    @classmethod
    def off(cls) -> contextlib.AbstractContextManager[None]:
        """Disable autocast on every type of device inside the context."""
        return cls.again([replace(state, enabled=False) for state in cls.now()])

    @staticmethod
    @contextlib.contextmanager
    def again(states: Sequence[Autocast]) -> Iterator[None]:
        """Set autocast to the given states inside the context."""
        with contextlib.ExitStack() as stack:
            for state in states:
                if state.enabled or torch.is_autocast_enabled(state.device):
                    stack.enter_context(
                        torch.autocast(
                            state.device, dtype=state.dtype, enabled=state.enabled, cache_enabled=state.cache
                        )
                    )
            yield


#: Autocast states while it is off everywhere, by what can still differ: weight cache, CPU dtype, CUDA dtype.
_states_while_off: dict[tuple[bool, torch.dtype, torch.dtype], tuple[Autocast, ...]] = {}


class Attributes:
    """A snapshot of the plain attributes of modules (or other objects) and of the lists, dicts and sets among them."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._saved = [(m, dict(own), {k: _contents(v) for k, v in own.items()}) for m in modules for own in [_own(m)]]

    def restore(self) -> tuple[str, ...]:
        """Put back what has changed; return the changed attributes as ``Class.name``."""
        changed = []
        for module, values, contents in self._saved:
            now = _own(module)
            there = static.own(module)
            for name in now.keys() - values.keys():
                changed.append(f"{type(module).__name__}.{name}")
                dict.pop(there, name, None)
            for name, value in values.items():
                if name not in now or now[name] is not value:
                    changed.append(f"{type(module).__name__}.{name}")
                    dict.__setitem__(there, name, value)
                if (held := contents[name]) is not None and _differs(value, held):
                    changed.append(f"{type(module).__name__}.{name}")
                    _refill(value, held)
        return tuple(sorted(set(changed)))


def _own(module: Any) -> dict[str, Any]:
    """Return the attributes of a module that are not torch's machinery; ``training`` counts as one of them."""
    return {k: v for k, v in dict.items(static.own(module)) if k not in _MACHINERY or k == "training"}


def _contents(value: Any) -> Any:
    """Return a shallow copy of a list, dict or set; None for anything else."""
    return value.copy() if type(value) in (list, dict, set) else None


def _differs(value: Any, held: Any) -> bool:
    """Compare a container with its copy by identity of the elements: ``==`` could run user code or compare tensors."""
    if len(value) != len(held):
        return True
    if type(value) is set:
        return {id(v) for v in value} != {id(v) for v in held}
    if type(value) is dict:  # in order: looking a key up may run its __eq__
        pairs = zip(value.items(), held.items(), strict=True)
        return any(k is not own or v is not known for (k, v), (own, known) in pairs)
    return any(a is not b for a, b in zip(value, held, strict=True))


def _refill(value: Any, held: Any) -> None:
    if isinstance(value, list):
        value[:] = held
    else:
        value.clear()
        value.update(held)


@contextlib.contextmanager
def buffers_aside(modules: Sequence[nn.Module], earlier: Mapping[int, Tensor]) -> Iterator[None]:
    """Let modules read and write copies of their buffers inside the context; the buffers themselves are never touched.

    Args:
        earlier: values from before the forward pass by ``id`` of the buffer; buffers that are missing are copied as is.
    """
    held = [(m, dict(own)) for m in modules if (own := static.held(m, "_buffers"))]
    copies: dict[int, Tensor] = {}
    for _, buffers in held:
        for buffer in buffers.values():
            if buffer is not None and id(buffer) not in copies:
                copies[id(buffer)] = earlier.get(id(buffer), buffer).detach().clone()
    try:
        for module, buffers in held:
            for name, buffer in buffers.items():
                if buffer is not None:
                    static.held(module, "_buffers")[name] = copies[id(buffer)]
        yield
    finally:
        for module, buffers in held:
            static.held(module, "_buffers").clear()
            static.held(module, "_buffers").update(buffers)


@contextlib.contextmanager
def attributes_aside(owners: Sequence[object]) -> Iterator[None]:
    """Replace tensors in plain attributes of objects (memory banks, caches) by copies inside the context."""
    with contextlib.ExitStack() as aside:
        for owner in owners:
            there = static.own(owner)
            for name, value in list(there.items()):
                if name not in _MACHINERY and _holds_tensor(value):
                    aside.callback(there.__setitem__, name, value)
                    there[name] = tensor_leaves.mapped(value, _copy)
        yield


def _copy(x: Tensor) -> Tensor:
    return x if issubclass(type(x), nn.Parameter) else x.detach().clone().requires_grad_(x.requires_grad)


def _holds_tensor(value: Any) -> bool:
    """Return whether a plain attribute is or holds a tensor that is no parameter."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return not issubclass(kind, nn.Parameter)
    return kind in _NESTS and any(map(_holds_tensor, value.values() if kind is dict else value))


@contextlib.contextmanager
def without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disable the user's and our module hooks inside the context; torch's own (weight and spectral norm, pruning) run.

    The dictionaries of modules are replaced and put back, the global ones emptied and refilled.
    """
    held: list[tuple[dict[str, Any], str, Any]] = []
    place = nn.modules.module
    globals_before = {name: OrderedDict(getattr(place, name)) for name in _GLOBAL_HOOKS if hasattr(place, name)}
    try:
        for name in globals_before:
            getattr(place, name).clear()
        for module in modules:
            for name in _HOOKS:
                there = static.module_dict(module)
                hooks = there.get(name)
                if hooks:
                    held.append((there, name, hooks))
                    there[name] = OrderedDict((k, h) for k, h in hooks.items() if _is_torchs(h))
        yield
    finally:
        for owner, name, hooks in held:
            owner[name] = hooks
        for name, hooks in globals_before.items():
            getattr(place, name).update(hooks)


def _is_torchs(hook: Any) -> bool:
    """Return whether a hook is defined in torch."""
    function = hook.__func__ if type(hook) is MethodType else hook
    owner = function if type(function) is FunctionType else type(hook)
    return str(owner.__module__).split(".")[0] == "torch"


@contextlib.contextmanager
def no_anomalies() -> Iterator[None]:
    """Turn autograd's anomaly mode off inside the context (no tracebacks, no check for NaN), whoever turned it on."""
    enabled, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False, False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(enabled, checks)
