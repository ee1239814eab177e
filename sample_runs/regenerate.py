"""Records every sample run again and writes down what diagnose says about it: `make samples`.

Each folder holds `train.py`, an ordinary script; `run/`, the log recorded from it; and what diagnose says about it.
The logs are committed, so that reports can be looked at without torch; a test holds them to their diagnoses.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Recorder options that keep a log small enough to commit.
EVERY = {"gpt-bf16-healthy": "4", "cnn-fp16-underflow": "4"}


def main() -> None:
    """Records the samples named on the command line, or all of them."""
    names = sys.argv[1:] or sorted(p.parent.name for p in HERE.glob("*/train.py"))
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment.pop("FORCE_COLOR", None)
    for name in names:
        folder = HERE / name
        print(f"recording {name}", flush=True)

        def precdoctor(*arguments: str, folder: Path = folder) -> None:
            command = [sys.executable, "-m", "precdoctor", *arguments]
            subprocess.run(command, cwd=folder, env=environment, check=True)

        options = ("--every", EVERY.get(name, "1"), "--redact-names", "-o", "run", "--force")
        precdoctor("record", *options, "--", "python", "train.py")
        (folder / "run" / "attach.jsonl").unlink()  # speaks of this machine's processes only
        precdoctor("diagnose", "run", "--output-format", "json", "-o", "diagnosis.json", "--force")
        precdoctor("diagnose", "run", "-o", "diagnosis.txt", "--force")


if __name__ == "__main__":
    main()
