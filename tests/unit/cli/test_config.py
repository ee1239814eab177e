from __future__ import annotations

from pathlib import Path

import pytest

from precdoctor.cli.common import rule_options, settings_in_force
from precdoctor.cli.config import SETTINGS, Settings
from precdoctor.errors import UsageError
from precdoctor.recording.options import RecordOptions


def settings(directory: Path, **environ: str) -> Settings:
    return Settings(environ, directory)


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    (tmp_path / "precdoctor.toml").write_text('[record]\nevery = 4\nmax-disk = "2GB"\n')
    assert settings(tmp_path).get("record", "every") == 4
    assert settings(tmp_path, PRECDOCTOR_RECORD_EVERY="8").get("record", "every") == 8
    assert settings(tmp_path, PRECDOCTOR_RECORD_EVERY="8").get("record", "every", "16") == 16
    assert settings(tmp_path).get("record", "steps") is None
    chosen = settings(tmp_path).chosen(
        "record", {"every": None, "max-disk": None, "include": ["a", "b"], "strict": None}
    )
    assert chosen == {"every": 4, "max_disk": 2_000_000_000, "include": ("a", "b")}


def test_a_flag_can_switch_off_what_the_file_switches_on(tmp_path):
    (tmp_path / "precdoctor.toml").write_text("[record]\nstrict = true\n")
    assert settings(tmp_path).get("record", "strict") is True
    assert settings(tmp_path).get("record", "strict", False) is False


def test_the_nearest_file_wins_whole_and_precdoctor_toml_before_pyproject(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.precdoctor.record]\nevery = 2\noutput = "runs/x"\n')
    assert settings(inner).get("record", "every") == 2
    assert settings(inner).get("record", "output") == tmp_path / "runs/x"  # relative to its file
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'other'\n")  # no table of ours: looked through
    assert settings(inner).get("record", "every") == 2
    (tmp_path / "precdoctor.toml").write_text("[gate]\nfail-on = 'warning'\n")
    assert settings(inner).get("record", "every") is None
    assert settings(inner).get("gate", "fail-on") == "warning"


def test_the_search_ends_at_the_repository_and_at_home(tmp_path, monkeypatch):
    (tmp_path / "precdoctor.toml").write_text("[record]\nevery = 4\n")
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    (repository / ".git").mkdir(parents=True)
    (repository / "deep").mkdir()
    elsewhere.mkdir()
    assert settings(repository / "deep").file is None
    assert settings(elsewhere).file is None  # neither in a repository nor under the home directory
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(elsewhere).get("record", "every") == 4
    assert settings(elsewhere).notes == [f"settings from {tmp_path / 'precdoctor.toml'}"]
    assert settings(repository / "deep").file is None
    assert settings(tmp_path).notes == []


@pytest.mark.parametrize("name", ["precdoctor.toml", "pyproject.toml"])
def test_a_file_that_others_could_have_written_is_not_used(tmp_path, monkeypatch, name):
    table = "[record]" if name == "precdoctor.toml" else "[tool.precdoctor.record]"
    file = tmp_path / name
    file.write_text(f"{table}\non-finding = 'touch /tmp/owned'\nevery = 4\n")

    def found():
        s = settings(tmp_path)
        return s.get("record", "every"), s.get("record", "on-finding"), " ".join(s.refused + s.notes)

    assert found() == (4, "touch /tmp/owned", "")
    for path, mode in ((tmp_path, 0o1777), (file, 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        every, command, told = found()
        assert (every, command) == (None, None) and f"{file} is not used: others can write to it" in told
        path.chmod(before)
    owner = file.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1000)
    every, command, told = found()
    if owner == 0:  # root's files are believed, but what acts is not taken from them
        assert (every, command) == (4, None) and "on-finding is not used, because the file is not yours" in told
    else:
        assert (every, command) == (None, None) and f"belongs to another user (uid {owner})" in told


def test_a_link_into_a_directory_that_others_can_write_to_is_not_followed(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/x.toml").write_text("[record]\nevery = 4\n")
    (tmp_path / "precdoctor.toml").symlink_to("shared/x.toml")
    assert settings(tmp_path).get("record", "every") == 4
    (tmp_path / "shared").chmod(0o777)
    found = settings(tmp_path)
    assert found.get("record", "every") is None
    assert "others can write to the directory it leads to" in found.refused[0]


def test_a_foreign_file_without_our_table_is_looked_through_in_silence(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project\n")
    (tmp_path / "pyproject.toml").chmod(0o666)
    assert settings(tmp_path).refused == []


def test_the_gate_does_not_judge_without_its_settings(tmp_path, monkeypatch):
    (tmp_path / "precdoctor.toml").write_text("[gate]\nfail-on = 'warning'\n")
    (tmp_path / "precdoctor.toml").chmod(0o666)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is not used: others can write to it"):
        settings_in_force(whole=True)


def test_options_go_to_rules_or_to_regressions_by_code_or_name_in_any_case(tmp_path):
    names = ("PD201", "pd801", "Underflow-Increased", "lost-weight-updates")
    (tmp_path / "precdoctor.toml").write_text("".join(f"[rules.{name}]\nx = 1\n" for name in names))
    found = settings(tmp_path)
    assert [*rule_options(found)] == ["PD201", "lost-weight-updates"]
    assert [*rule_options(found, of_regressions=True)] == ["pd801", "Underflow-Increased"]


def test_keys_may_be_written_with_underscores_and_rules_keep_theirs(tmp_path):
    (tmp_path / "precdoctor.toml").write_text("[record]\nfirst_step = 100\n[rules.PD201]\nmin_fraction = 0.1\n")
    assert settings(tmp_path).get("record", "first-step") == 100
    assert settings(tmp_path).rules == {"PD201": {"min_fraction": 0.1}}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[record]\nevry = 2\n", r"no key 'evry' in \[record\]; did you mean 'every'\?"),
        ("[recrod]\nevery = 2\n", r"no section 'recrod'; did you mean 'record'\?"),
        ("[record]\nevery = 3\n", "every: 3 is not a power of two"),
        ("[record]\nmax-disk = '5 parsecs'\n", "max-disk: '5 parsecs' is not a size"),
        ("record = 3\n", r"write \[record\] above its keys"),
        ("[rules]\nPD201 = 3\n", r"write \[rules.PD201\]"),
        ("[record\n", "cannot be read as TOML"),
        ("[diagnose]\nfail-on = 'eror'\n", "did you mean 'error'"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path, text, complaint):
    (tmp_path / "precdoctor.toml").write_text(text)
    with pytest.raises(UsageError, match=complaint) as error:
        settings(tmp_path)
    assert "precdoctor.toml" in str(error.value)


def test_a_bad_environment_is_named(tmp_path):
    with pytest.raises(
        UsageError, match=r"no setting 'PRECDOCTOR_RECORD_EVRY'; did you mean 'PRECDOCTOR_RECORD_EVERY'"
    ):
        settings(tmp_path, PRECDOCTOR_RECORD_EVRY="2")
    with pytest.raises(UsageError, match="PRECDOCTOR_GATE_FAIL_ON: 'always' is not one of"):
        settings(tmp_path, PRECDOCTOR_GATE_FAIL_ON="always")


def test_what_carries_a_recording_is_not_a_setting(tmp_path):
    settings(tmp_path, PRECDOCTOR_RUN="/x", PRECDOCTOR_OPTIONS="{}")


def test_undecodable_and_binary_files(tmp_path):
    (tmp_path / "precdoctor.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read as TOML"):
        settings(tmp_path)


def test_every_recorder_option_is_a_setting():
    import dataclasses

    options = {f.name.replace("_", "-") for f in dataclasses.fields(RecordOptions)}
    asked_by_others = {"kinds", "trace-steps", "may-halt", "max-steps"}  # a block, autopsy, --halt-on, trial
    told_to_the_parent = {"output", "autopsy", "halt-on", "on-finding", "reference", "shared"}
    shadows = {"shadow", "shadow-at", "shadow-every", "shadow-steps"}
    assert options - asked_by_others - shadows == set(SETTINGS["record"]) - told_to_the_parent
    assert {"at", "every", "steps", "reference"} <= set(SETTINGS["shadow"])
