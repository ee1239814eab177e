"""The wrapper of every hook body."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from precdoctor.recording.kernels.outside_user_modes import without_functions
from precdoctor.recording.ops.dispatched_ops import sweep
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import waits

P = ParamSpec("P")
R = TypeVar("R")


def guarded(context: StepContext) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Wrap a hook body: a defect in it never reaches the user's program, and its time is charged to the recorder.

    No ``__torch_function__`` of the user's runs in the body. Time that it waits for a device is charged separately, as
    ``wait_ns``: the device works for the user meanwhile. In a thread that is not recorded the body does not run, and
    the wrapper returns None.
    """

    def decorate(body: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(body)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            threads = context.threads
            if threads.others and threads.is_other():
                sweep()
                return None
            if context.on_the_clock:  # inside another hook body, which is charged for both
                try:
                    with without_functions():
                        return body(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - see below
                    context.internal_error(error)
                    return None
            context.on_the_clock = True
            waited, began = waits.ns, time.perf_counter_ns()
            try:
                if threads.others and threads.is_other():  # now on_the_clock keeps other threads from taking over
                    return None
                with without_functions():
                    return body(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a defect of the recorder must not reach the training
                context.internal_error(error)
                return None
            finally:
                context.on_the_clock = False
                facts = context.current
                facts.recorder_ns += time.perf_counter_ns() - began
                if (waited := waits.ns - waited) != 0:
                    facts.recorder_ns -= waited
                    facts.wait_ns += waited

        return wrapper

    return decorate
