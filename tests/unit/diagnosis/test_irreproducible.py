"""What speaks against blaming the machine."""

import pytest

from precdoctor.diagnosis import diagnose
from tests.rules.PD108.samples import OTHERS


@pytest.mark.parametrize("make", OTHERS)
def test_a_known_reason_leaves_the_finding_to_the_rules_on_range(make, tmp_path):
    codes = {f.code for f in diagnose(make().write(tmp_path / "run")).findings}
    assert "PD101" in codes and "PD108" not in codes
