"""Two texts as they are written: in two columns on a terminal, one after the other elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MIN_WIDTH = 72
"""Narrower than this, two columns are harder to read than one text after the other."""


class SideBySide:
    """A context manager; `write` and `mark` go to the column that was begun last."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._columns: list[tuple[str, Text]] = []
        in_columns = console.is_terminal and console.width >= MIN_WIDTH
        self._live = Live(console=console, refresh_per_second=12, transient=False) if in_columns else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._console.print()

    def begin(self, title: str) -> None:
        """The next text."""
        if self._live is None:
            space = "\n\n" if self._columns else "\n"
            self._console.print(Text.assemble(space, (f"{title}:", "bold")))
        self._columns.append((title, Text()))
        self._show()

    def write(self, part: str) -> None:
        self._add(part, "")

    def mark(self, event: str) -> None:
        """Something that happened just here, in the middle of the text."""
        self._add(f" [{event}] ", "bold red")

    def _add(self, part: str, style: str) -> None:
        self._columns[-1][1].append(part, style)
        if self._live is None:
            self._console.print(Text(part, style=style), end="")
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._grid())

    def _grid(self) -> Table:
        grid = Table.grid(expand=True)
        for _ in self._columns:
            grid.add_column(ratio=1)
        grid.add_row(*(Panel(text, title=title, border_style="cyan") for title, text in self._columns))
        return grid
