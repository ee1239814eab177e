"""How long a step of Adam can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.families.updates.second_moment_underflow_rounded import adam_bound

_GRADIENTS = st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3, -1.0, -1e3]), min_size=1, max_size=60)


@given(_GRADIENTS, st.sampled_from([0.0, 0.5, 0.9, 0.95]), st.sampled_from([0.95, 0.99, 0.999]))
def test_no_gradients_make_a_longer_step(gradients: list[float], beta1: float, beta2: float) -> None:
    bound = adam_bound(beta1, beta2)
    assert bound is not None
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        if v > 0.0:
            corrected = m / (1.0 - beta1**t) / np.sqrt(v / (1.0 - beta2**t))
            assert abs(corrected) <= bound * (1.0 + 1e-9)


def test_the_bound_with_the_usual_settings() -> None:
    assert adam_bound(0.9, 0.999) == pytest.approx(7.27, abs=0.01)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.5), (1.0, 0.999), (0.9, 1.0), (-0.1, 0.9)])
def test_settings_without_a_bound(beta1: float, beta2: float) -> None:
    assert adam_bound(beta1, beta2) is None
