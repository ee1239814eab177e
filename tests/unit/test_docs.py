"""The documentation keeps up with the program."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

from precdoctor.cli import main
from precdoctor.cli.config import SETTINGS
from precdoctor.runlog.schema import EVENTS, KINDS, TABLES
from tests.support.runs import write_run

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_in_step():
    wanted = generator().pages()
    assert {*(DOCS / "rules").glob("*.md"), DOCS / "screens.md"} == set(wanted), "run: make docs"
    for path, content in wanted.items():
        assert path.read_text() == content, f"{path.name} is stale; run: make docs"


def test_the_page_of_screens_shows_ten_that_fit_and_what_to_type_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (DOCS / "screens.md").read_text()
    shown = r"```text\n\$ precdoctor diagnose (\S+)\n(.*?)```\n\n[^\n]*\n\n    (precdoctor [^\n]+)\n"
    found = re.findall(shown, text, re.DOTALL)
    assert len(found) == text.count("\n## ") == 10
    for run, screen, command in found:
        assert (ROOT / run / "run.json").exists()
        assert max(map(len, screen.splitlines())) <= 80
        assert "binade" not in screen and screen.count("autopsy") <= 1
        name, *arguments = shlex.split(command.replace("fix.toml", str(tmp_path / "fix.toml")))[1:]
        if name != "record":  # which trains something
            assert main([name, *arguments, *(["--force"] if "--prescription" in arguments else [])]) == 0, command
            assert capsys.readouterr().out


def test_links_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())]
    here = [(page, target) for page, target in links if "://" not in target and not target.endswith("diagnose.svg")]
    assert len(here) > 100  # without the picture that comes with `make samples`
    dead = [f"{page.relative_to(ROOT)}: {target}" for page, target in here if not (page.parent / target).exists()]
    assert dead == []


def test_the_navigation_of_the_site_names_pages_that_are_there():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    named = re.findall(r"(?:- |: )([\w/-]+(?:\.md|/))\n", navigation)
    assert len(named) > 20 and [name for name in named if not (DOCS / name).exists()] == []
    assert {f"guides/{page.name}" for page in (DOCS / "guides").glob("*.md")} <= set(named)


def test_the_run_log_page_names_every_column_kind_and_event():
    text = (DOCS / "run-log.md").read_text()
    names = {field.name for schema in TABLES.values() for field in schema} | set(KINDS) | set(EVENTS)
    assert {n for n in names if f"`{n}`" not in text} == set()


def test_the_configuration_page_names_every_key():
    text = (DOCS / "configuration.md").read_text()
    for section, keys in SETTINGS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{section}`"))
        assert re.findall(r"`([a-z-]+)`", row) == [section, *keys]


def test_the_recipes_of_the_run_log_page_run(tmp_path, monkeypatch):
    rows = [
        {"step": s, "module": m, "kind": k, "amax": 2.0**s, "zero": 1, "numel": 4, "exp_lo": 0, "exp_hist": [1, 2]}
        for s in range(3)
        for m in ("a", "b")
        for k in ("output", "grad_output")
    ]
    write_run(tmp_path / "runs" / "a", rows, [{"step": s, "loss": 1.0} for s in range(3)])
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    recipes = re.findall(r"```python\n(.*?)```", (DOCS / "run-log.md").read_text(), flags=re.DOTALL)
    assert len(recipes) >= 4
    for recipe in recipes:
        exec(recipe, scope)
    assert len(scope["tensors"]) == 6 and scope["histogram"].total == 3


def test_the_recipe_of_the_replay_page_runs():
    [recipe] = re.findall(r"```python\n(.*?)```", (DOCS / "what-if.md").read_text(), flags=re.DOTALL)
    scope: dict[str, object] = {}
    exec(recipe, scope)
    assert len(scope["amax"]) == 4
