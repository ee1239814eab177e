"""What precdoctor says to type next can be pasted into a shell, whatever the path is called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.cli import main
from precdoctor.recording.process import launch
from precdoctor.runlog.shell import quoted, quoted_command, quoted_path
from tests.support import hostile
from tests.support.runs import write_run

BASH = shutil.which("bash")
NAMES = [
    b"plain",
    b"a b",
    b"it's",
    b'"quoted"',
    b"two\nlines",
    b"tab\tand\rreturn",
    b"-o",
    b"--help",
    b"$(touch x)`y`;&|<>*?[a]{b,c}",
    b"back\\slash\\012",
    b"~root",
    b"\x1b[31mred\x1b]0;t\x07",
    b"latin \xe9\xff",
    "näme €".encode(),
    "right\u202eleft\u200b".encode(),
    b"##[error]x",
    b"7\n7",
]


def words_of(line: str) -> list[bytes]:
    """The arguments that bash makes of a line that begins with ``precdoctor``."""
    script = f"precdoctor() {{ printf '%s\\0' \"$@\"; }}\n{line}\n"
    done = subprocess.run([BASH or "bash"], input=os.fsencode(script), capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.split(b"\0")[:-1]


pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


def test_words_survive_a_shell():
    words = [os.fsdecode(name) for name in NAMES] + [text for text in hostile.NAMES if "\0" not in text and text]
    words = [w for w in words if not any(0xD800 <= ord(c) < 0xDC80 or 0xDCFF < ord(c) <= 0xDFFF for c in w)]
    line = f"precdoctor {quoted_command(words)}"
    assert words_of(line) == [os.fsencode(word) for word in words]
    assert line.isprintable()


@given(st.text(st.characters(exclude_characters="\0")))
def test_any_word_is_one_printable_line(word):
    assert quoted(word).isprintable()
    assert "##[" not in quoted(word)


@pytest.mark.parametrize("name", NAMES)
def test_the_closing_line_can_be_pasted(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    path = Path(os.fsdecode(name))
    write_run(tmp_path / path, [{"step": 0}], [{"step": 0}])
    launch._close(tmp_path / path, 0, quiet=False)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.isprintable() for line in said)
    (command, argument) = words_of(said[1].strip())
    assert command == b"diagnose"
    assert (tmp_path / path).samefile(os.fsdecode(argument))
    assert not argument.startswith(b"-")


def test_a_long_command_is_printed_whole(tmp_path, capfd):
    path = "x" * 200 + "/" + "it's " * 40
    assert words_of(f"precdoctor {quoted_path(path)}") == [path.encode()]
    command = ["python", "train.py", "--name", "y" * 3000]
    run = write_run(tmp_path / "run", [{"step": 0}], [{"step": 0}], info={"command": command, "cwd": str(tmp_path)})
    assert main(["autopsy", "--dry-run", str(run)]) == 0
    assert words_of(capfd.readouterr().out.strip().replace("&& python", "&& precdoctor"))[-1] == b"y" * 3000
