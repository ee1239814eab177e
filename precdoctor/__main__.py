"""``python -m precdoctor`` is ``precdoctor``."""

import sys

from precdoctor.cli import main

sys.exit(main())
