"""Output of the command: JSON for programs, short tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

OK, FINDINGS, BAD_INPUT, SEVERE = 0, 1, 2, 3
"""Exit codes: all is well; something was found; the input is wrong; it does not work here."""


def size_text(nbytes: float) -> str:
    """Bytes in words: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age_text(seconds: float) -> str:
    """Seconds in words: "3.2 h"."""
    for limit, div, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / div:.0f} {unit}" if unit == "s" else f"{seconds / div:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"


class Output:
    """Where a command speaks. With ``as_json`` stdout holds exactly one JSON document."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._console = Console(soft_wrap=True, highlight=False)
        self._error = Console(stderr=True, highlight=False, soft_wrap=True)

    def document(self, value: Any) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")

    def line(self, text: str) -> None:
        if not self.as_json:
            self._console.print(text, markup=False)

    def error(self, text: str) -> None:
        self._error.print(f"hicache-ext: {text}", markup=False)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        if self.as_json:
            return
        table = Table(title=title or None, title_justify="left")
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self._console.print(table)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Any]:
        """A bar on stderr; call the yielded function with the units done."""
        with Progress(console=self._error, transient=True, disable=self.as_json or total == 0) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.advance(task, done)
