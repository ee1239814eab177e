"""Records the sample runs and the rules' recorded samples again: `make samples`.

`sample_runs/<name>/` holds `train.py`, an ordinary script; `run/`, the log recorded from it; `diagnosis.json` and
`diagnosis.txt`, what precdoctor says about it. `tests/rules/<CODE>/{firing,healthy}/<name>/` holds `train.py` and
`run/`; what must be found in a firing one stands in its `expected.json`, which is written by hand, never from here. The
logs are committed, so that reports and rules can be looked at without torch; tests hold them to what lies beside them.
"""

import os
import subprocess
import sys
from pathlib import Path

SAMPLE_RUNS = Path(__file__).resolve().parent
RULES = SAMPLE_RUNS.parent / "tests" / "rules"
#: Recorder options that keep a log small enough to commit.
EVERY = {
    "gpt-bf16-healthy": "4",
    "cnn-fp16-underflow": "4",
    "fresh-scaler": "8",
    "gpt-fp8-delayed": "4",
    "gpt-fp8-wrong-margin": "4",
    "bf16-count": "4",
}


#: Recorded as nobody asks for anything: led by the budget.
BUDGETED = ("crash-after-one-step", "five-steps", "nan-in-data", "lora-bf16", "two-ranks", "compiled")

#: What is not run by `python train.py`, but on two ranks.
ON_TWO_RANKS = ("two-ranks", "reset-after-wrapping", "batch-norm-per-rank")

#: Samples whose command fails.
FAILING = ("crash-after-one-step",)

#: Samples of what is said without a replay of the step.
OBSERVED = ("constant-sample-batchnorm",)


#: Rules whose samples are compared with FP32.
SHADOWED = ("PD704",)


def main() -> None:
    """Records the samples named on the command line, or all of them."""
    folders = {p.parent.name: p.parent for p in (*SAMPLE_RUNS.glob("*/train.py"), *RULES.glob("PD*/*/*/train.py"))}
    unknown = set(sys.argv[1:]) - set(folders)
    if unknown:
        raise SystemExit(f"no such sample: {', '.join(sorted(unknown))}; there are {', '.join(sorted(folders))}")
    for name in sys.argv[1:] or sorted(folders, key=lambda n: folders[n]):
        print(f"recording {name}", flush=True)
        record(folders[name])


def record(folder: Path) -> None:
    """Runs the folder's script under the recorder; a sample run is diagnosed as well."""
    if folder.parents[1].name in SHADOWED:
        precdoctor(folder, "shadow", "--redact-names", "-o", "run", "--force", "--", "python", "train.py")
        (folder / "run" / "attach.jsonl").unlink()
        return
    every = () if folder.name in BUDGETED else ("--every", EVERY.get(folder.name, "1"))
    options = (*every, "--redact-names", "-o", "run", "--force")
    if folder.name in OBSERVED:
        options += ("--on-nonfinite", "observe")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if folder.name in ON_TWO_RANKS else ()
    precdoctor(folder, "record", *options, "--", "python", *launcher, "train.py", fails=folder.name in FAILING)
    (folder / "run" / "attach.jsonl").unlink()  # speaks of this machine's processes only
    if folder.parent == SAMPLE_RUNS:
        precdoctor(folder, "diagnose", "run", "--output-format", "json", "-o", "diagnosis.json", "--force")
        precdoctor(folder, "diagnose", "run", "-o", "diagnosis.txt", "--force")


def precdoctor(folder: Path, *arguments: str, fails: bool = False) -> None:
    """Runs a command in ``folder``, its text as wide and as plain on every machine; one that ``fails`` ends with 1."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "precdoctor", *arguments], cwd=folder, env=environment, check=not fails
    )
    if fails and done.returncode != 1:
        raise SystemExit(f"{folder.name} was to end with status 1, not {done.returncode}")


if __name__ == "__main__":
    main()
