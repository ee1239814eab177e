"""Which variables of the user's running code may be a loss; whole loops are in ``integration/origin``."""

from __future__ import annotations

import sys

import torch

from precdoctor.recording.microscope import given_up


class Namespace(dict):
    """A namespace of the user's: nothing of it may be called."""

    def values(self):
        raise AssertionError


def test_only_scalars_that_autograd_has_computed_may_be_losses():
    x = torch.ones(2, requires_grad=True)
    loss, vector, constant, leaf, number = x.sum(), x * 2, torch.tensor(1.0), torch.ones((), requires_grad=True), 1.0  # noqa: F841
    assert list(given_up._variables(sys._getframe())) == [loss]


def test_the_search_goes_outwards_and_leaves_namespaces_of_the_users_alone():
    loss = torch.ones(1, requires_grad=True).sum()

    def inner():
        own = torch.ones(1, requires_grad=True).prod()
        return own, list(given_up._running(sys._getframe()))

    own, found = inner()
    assert [x is y for x, y in zip(found, [own, loss], strict=False)] == [True, True]
    space = Namespace(find=lambda: list(given_up._variables(sys._getframe(1))))
    exec("found = find()", {}, space)
    assert space["found"] == []


def test_functions_are_left_out_where_reading_them_would_keep_their_variables_alive():
    loss = torch.ones(1, requires_grad=True).sum()  # noqa: F841
    assert list(given_up._running(sys._getframe(), functions=False)) == []
