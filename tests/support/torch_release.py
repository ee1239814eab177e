"""Which release of torch the tests run on, for what older ones cannot do (docs/reliability.md)."""

import pytest
import torch

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: Dynamo keeps what a compiled function returned, and traces hooks into compiled graphs.
since_2_12 = pytest.mark.skipif(RELEASE < (2, 12), reason="before torch 2.12 Dynamo does less (docs/reliability.md)")
