"""Notes of the user's line: each node gets the line that made it, from the cache as well."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.fx import traceback as stored_traces

from precdoctor.recording.scene import loss_code
from precdoctor.recording.scene.line_notes import LineNotes, line_of, note_on
from precdoctor.recording.scene.loss_code import LossCode


@pytest.fixture
def notes(monkeypatch):
    """Notes at every node that the test makes, as :class:`LossCode` makes them."""
    found = LossCode.__new__(LossCode)
    found.running, found.bare, found._context = False, False, SimpleNamespace(state="armed", trace=None)
    monkeypatch.setattr(stored_traces, "format_stack", stored_traces.format_stack)
    for kind in (torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    made = []
    monkeypatch.setattr(loss_code, "LineNotes", lambda: made.append(LineNotes()) or made[0])
    assert found._install()
    yield made[0]
    found.close()


def number(x):
    line = line_of(note_on(x.grad_fn))
    assert line.file == __file__
    return line.number


def test_a_function_of_torch_is_noted_at_the_line_that_calls_it_however_often(notes):
    x = torch.ones(2, 3, requires_grad=True)
    target = torch.zeros(2, 3)
    first = []
    for _ in range(2):
        here = sys._getframe().f_lineno
        one = torch.nn.functional.mse_loss(x, target)
        two = torch.nn.functional.mse_loss(x, target)
        three = x * 2.0
        found = [number(loss) for loss in (one, two, three)]
        assert found == [here + 1, here + 2, here + 3]
        first = first or sorted(notes.cached)
        assert sorted(notes.cached) == first, "the second round is answered from the cache"


def test_a_line_that_a_function_of_the_user_shares_is_the_one_inside_it(notes):
    def scaled(x):
        return x * 3.0

    x = torch.ones(2, requires_grad=True)
    assert number(scaled(x)) == number(scaled(scaled(x))) == scaled.__code__.co_firstlineno + 1


def test_nothing_is_cached_while_saved_tensors_have_hooks():
    notes = LineNotes()
    assert notes.note_for(sys._getframe(), hooked=True)[0].startswith("precdoctor\0hooked\0")
    assert not notes.cached


def test_a_node_without_a_note_of_ours_has_none():
    assert note_on((torch.ones((), requires_grad=True) * 2.0).grad_fn) is None
    assert line_of("precdoctor\0\0" + "0\0") is None
