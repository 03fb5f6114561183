# SPDX-License-Identifier: Apache-2.0
"""Progress bars, for a terminal only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from torchrelay.cli.text import printable, shortened

if TYPE_CHECKING:
    from rich.progress import TaskID


@contextlib.contextmanager
def bars(stream: TextIO) -> Iterator[Callable[[str, int, int], None]]:
    """One bar a stage, gone when the work is done, so that only the result stays."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:

        def told(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(shortened(printable(stage), 40), total=None)
            # A stage of unknown length has a total of 0: it pulses.
            progress.update(tasks[stage], completed=done, total=total or None)

        yield told
