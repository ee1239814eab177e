"""``make torture``: every section in turn, one line each.

    python -m benchmarks.torture [--seed N] [--share 0.1] [SECTION ...] > benchmarks/results/torture.md

Sections: kills, mutations, names, commands, bombs, environments, threads. Exits with 1 when one of them fails.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.torture.commands import commands
from benchmarks.torture.files import bombs, cores_off, kills, mutations, names
from benchmarks.torture.processes import ENVIRONMENTS, environments, threads
from benchmarks.torture.targets import fresh
from tests.support.hostile import NAMES

#: Each section with its full count.
SECTIONS: dict[str, tuple[Callable[[Path, int, int], str], int]] = {
    "kills": (kills, 200),
    "mutations": (mutations, 2000),
    "names": (names, len(NAMES)),
    "commands": (commands, 200),
    "bombs": (bombs, 104),
    "environments": (environments, len(ENVIRONMENTS)),
    "threads": (threads, 20),
}


def main() -> int:
    """Run the sections asked for and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture")
    parser.add_argument("sections", nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    given = parser.parse_args()
    logging.disable()
    cores_off()
    failed = False
    print("# Torture\n\n`make torture`, seed %d.\n\n| section | result | s |\n|---|---|---|" % given.seed)  # noqa: UP031
    for name in given.sections or SECTIONS:
        section, count = SECTIONS[name]
        began = time.monotonic()
        try:
            said = section(
                fresh(Path("build/torture") / name).absolute(), given.seed, max(1, round(count * given.share))
            )
        except Exception as error:  # noqa: BLE001 - the other sections are run as well
            traceback.print_exc()
            failed, said = True, f"FAILED: {error}"
        print(f"| {name} | {said} | {time.monotonic() - began:.0f} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
