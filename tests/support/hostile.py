"""Names as an attacker, a bug or an unlucky user writes them. Every reporter is shown all of them."""

from __future__ import annotations

NAMES: tuple[str, ...] = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]><!--",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://example.invalid\x1b\\link\x1b]8;;\x1b\\",
    "\x9b2J",
    "[bold red]markup[/bold red]",
    "[/]",
    "[link=http://example.invalid]x[/link]",
    ":boom:",
    "line one\nline two",
    "carriage\rreturn",
    "::error file=x,line=1::owned",
    "a|b|c",
    "| --- |\n| x |",
    "`code` **bold** [a](b)",
    "\u202egnp.exe",
    "\u2066isolate\u2069",
    "para\u2028graph\u2029",
    "zero\u200bwidth\ufeff",
    "lone \udcff surrogate",
    "nul\x00byte",
    "=cmd|' /C calc'!A0",
    "%0A%0D%3A",
    "{{ 7 * 7 }} ${7*7} %s %n",
    "wide 漢字 🧨",
    "x" * 5000,
)
