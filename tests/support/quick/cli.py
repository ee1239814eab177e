"""`precdoctor` of this tree, whether it is installed or not."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[3])
from precdoctor.cli import main  # noqa: E402 - what the line above is for

sys.exit(main())
