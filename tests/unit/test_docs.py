"""The documentation keeps up with the program."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path

from precdoctor.cli import main
from precdoctor.cli.config import SETTINGS
from precdoctor.diagnosis.registry import RULES
from precdoctor.runlog.schema import EVENTS, KINDS, TABLES
from tests.support.runs import write_run

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = generator()
#: Every page of the site by its path below docs/: the written ones and those of the rules.
SITE = {str(p.relative_to(DOCS)): p.read_text() for p in DOCS.rglob("*.md")} | GENERATE.rule_pages()


def test_the_page_of_screens_is_in_step():
    assert SITE["screens.md"] == GENERATE.screens(), "run: make docs"


def test_rules_have_pages_and_the_index_names_them():
    assert {f"rules/{rule.code}.md" for rule in RULES} == set(GENERATE.rule_pages()) - {"rules/index.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", SITE["rules/index.md"])) == {f"{rule.code}.md" for rule in RULES}
    assert not (DOCS / "rules").exists(), "the site makes these pages; nobody commits them"


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


def test_every_promise_names_its_tests_and_they_are_there():
    promises = SITE["reliability.md"].split("\n## ")[0]
    for promise in re.split(r"\n(?=\d+\. )", promises)[1:]:
        assert re.search(r"Tests?: `tests/", promise), promise.splitlines()[0]
    for page in ("reliability.md", "security.md", "architecture.md"):
        for file, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", SITE[page]):
            assert (ROOT / file).is_file(), f"{page} names {file}"
            assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{page} names {file}::{function}"


def test_links_lead_somewhere():
    pages = {DOCS / name: text for name, text in SITE.items()} | {p: p.read_text() for p in ROOT.glob("*.md")}
    links = [(page, target) for page, text in pages.items() for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text)]
    here = [(page, target) for page, target in links if "://" not in target and not target.endswith("diagnose.svg")]
    assert len(here) > 100  # without the picture that comes with `make samples`
    paths = {(page, target): Path(os.path.normpath(page.parent / target)) for page, target in here}
    assert {page.name: target for (page, target), to in paths.items() if to not in pages and not to.exists()} == {}


def test_the_navigation_of_the_site_names_pages_that_are_there():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    named = re.findall(r"(?:- |: )([\w/-]+(?:\.md|/))\n", navigation)
    assert len(named) > 20 and [n for n in named if n != "rules/" and not (DOCS / n).exists()] == []
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
