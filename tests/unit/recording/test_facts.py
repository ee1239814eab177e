"""What rank.json holds of settings."""

import pytest
import torch

from precdoctor.recording.model.static import plain


@pytest.mark.parametrize("needs", [False, True])
def test_a_setting_that_is_a_tensor_is_written_as_a_number_and_warns_of_nothing(needs):
    """torch warns where a tensor that needs a gradient is made a number, and warnings are errors here."""
    assert plain(torch.tensor(0.5, requires_grad=needs)) == 0.5
    assert plain((torch.tensor(0.5, requires_grad=needs), "adam")) == [0.5, "adam"]
