"""Hooks of the documentation site (mkdocs.yml): all pages of its folders, the rules' own, the schemas."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from generate import rule_pages
from mkdocs.structure.files import File

from precdoctor.diagnosis.survey.measures import MEASURES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
RULES = rule_pages()
SCHEMAS = DOCS.parent / "precdoctor" / "reporting" / "schema"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """``Rules: rules/`` in the navigation stands for all pages there, the index first; a page of docs/ that the
    navigation does not name goes to the end of its last section.
    """
    sections = [section for section in config.nav or () if isinstance(section, dict)]
    for section in sections:
        for title, inside in section.items():
            if isinstance(inside, str) and inside.endswith("/"):
                pages = {inside + page.name for page in (DOCS / inside).glob("*.md")}
                pages |= {page for page in RULES if page.startswith(inside)}
                section[title] = sorted(pages, key=lambda page: (not page.endswith("/index.md"), page))
    named = str(config.nav)
    (last,) = sections[-1].values()
    last += [page.name for page in sorted(DOCS.glob("*.md")) if f"'{page.name}'" not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The rules make their pages; the JSON Schemas lie in the package, and on the site at ``schema/``."""
    for page, content in RULES.items():
        files.append(File.generated(config, page, content=content))
    for schema in sorted(SCHEMAS.glob("*.json")):
        files.append(File.generated(config, f"schema/{schema.name}", abs_src_path=str(schema)))
    return files


def measures() -> str:
    """A table of the measures."""
    rows = [f"| `{m.name}` | {m.unit} | {m.definition} | {', '.join(m.columns)} |" for m in MEASURES.values()]
    return "\n".join(["| measure | unit | definition | from the columns |", "|---|---|---|---|", *rows])


def on_page_markdown(markdown: str, page: Page, **_given: object) -> str:
    """The table of measures goes where a page asks for it. Links to schemas find them; other files are named."""

    def beyond(match: re.Match[str]) -> str:
        words, target = match.groups()
        place = Path(os.path.normpath((DOCS / page.file.src_uri).parent / target))
        if place.is_relative_to(DOCS):
            return match.group()
        if place.parent == SCHEMAS:
            up = "../" * page.file.src_uri.count("/")
            return f"[{words}]({up}schema/{place.name})"
        return f"{words} (`{place.relative_to(DOCS.parent)}`)"

    whole = markdown.replace("<!-- measures -->", measures())
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)", beyond, whole)
