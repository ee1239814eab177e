"""Coverage-guided fuzzing of the readers: ``python -m benchmarks.torture.fuzz [SECONDS]``; needs atheris.

The seeds are good files that the real writers make; inputs that reach new code are kept below build/fuzz. The first
byte of an input picks the reader. A finding ends the run with its traceback; its input is in build/fuzz/finding-*.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["precdoctor.runlog", "precdoctor.comparison", "precdoctor.cli.config"]):
    from benchmarks.torture.targets import attempt, fresh, targets

BUILD = Path("build/fuzz")


def main(seconds: int) -> None:
    """Fuzz all readers for so many seconds."""
    logging.disable()
    workspace = fresh(BUILD / "workspace")
    readers = targets(workspace)
    corpus = BUILD / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, reader in enumerate(readers):
        for n, seed in enumerate(reader.seeds):
            (corpus / f"seed-{number}-{n}").write_bytes(bytes([number]) + seed)

    def one(data: bytes) -> None:
        if data:
            attempt(readers[data[0] % len(readers)], data[1:])

    limits = [
        f"-max_total_time={seconds}",
        "-max_len=65536",
        "-timeout=30",
        "-rss_limit_mb=3000",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={BUILD}/finding-", *limits], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1800)
