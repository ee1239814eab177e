"""Which line an op is put down to."""

import os

import pytest
import torch

import precdoctor.recording
from precdoctor.recording.observe.call_frame import inside_function
from precdoctor.recording.ops.source_lines import innermost_user_line
from precdoctor.recording.process.attach import caller_outside

OWN = os.path.dirname(precdoctor.recording.__file__)  # noqa: PTH120 - as frames spell it
TRACER, REPLAY = (os.path.join(OWN, "microscope", f"{name}.py") for name in ("tracer", "replay"))  # noqa: PTH118
CASTS = os.path.join(OWN, "fp8", "casts.py")  # noqa: PTH118
TORCH = torch.functional.__file__


def through(*files, call=innermost_user_line, module="made"):
    """The line that is found when frames of these files lie between the user and the question, innermost last."""
    for file in reversed(files):
        scope = {"inner": call, "__name__": module}
        exec(compile("def call(): return inner()", file, "exec"), scope)
        call = scope["call"]
    return call()


def test_the_user_s_line_is_found_behind_torch_and_the_tracer():
    assert through(TORCH, TRACER).file == __file__


def test_a_wrapper_around_a_function_of_torch_hides_no_line():
    assert through(CASTS, TORCH, TRACER).file == __file__


def test_whoever_starts_a_replay_is_no_line_of_an_op():
    assert through(REPLAY, TORCH, TRACER) is None


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<timed exec>", "<ipython-input-3-0a1b2c>"])
def test_code_without_a_file_is_the_user_s_where_it_is_the_main_module(file):
    assert through(file, TORCH, TRACER, module="__main__") == (file, 1)
    assert through(file, TORCH, TRACER).file == __file__
    assert through(file, call=caller_outside, module="__main__") == (file, 1)
    assert through(file, call=caller_outside)[0] == __file__


class Asking(torch.nn.Module):
    """Notes whether a custom autograd function runs it."""

    inside = None

    def forward(self, x):
        Asking.inside = inside_function()
        return x


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Asking()(x)


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return Asking()(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return Asking()(x)


def reentrant(x):
    return torch.utils.checkpoint.checkpoint(Asking(), x, use_reentrant=True)


def in_a_module(x):
    return torch.nn.Sequential(Asking())(x)


@pytest.mark.parametrize(
    ("call", "inside"),
    [
        *((of, True) for of in (WithContext.apply, WithSetup.apply, Cast.apply)),
        *((reentrant, True), (Asking(), False), (in_a_module, False), (torch.no_grad()(Asking()), False)),
    ],
)
def test_what_a_custom_function_calls_runs_inside_it(call, inside):
    call(torch.ones(2, requires_grad=True))
    assert Asking.inside is inside
