# SPDX-License-Identifier: Apache-2.0
"""Where output goes: results to stdout, everything else to stderr, nothing raw to a terminal.

rich is imported only where a terminal is looking; elsewhere output is plain.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from torchrelay.cli.text import Line, duration, printable

if TYPE_CHECKING:
    from torchrelay.reports import Report

Progress = Callable[[str, int, int], None]

_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim", "head": "bold"}


class OutputLostError(Exception):
    """Standard output could not be written: the disk is full or the device is gone."""


class Output:
    """The two streams of one run, and the secrets that neither may show.

    Args:
        stdout: Where results go.
        stderr: Where messages and progress go.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._secrets: set[str] = set()

    def conceal(self, secrets: Iterable[str]) -> None:
        """Never show these from here on."""
        self._secrets.update(secrets)

    def report(self, report: Report, *, as_json: bool) -> None:
        """The result of a command."""
        if as_json:
            import msgspec

            self.object(msgspec.to_builtins(report))
        else:
            from torchrelay.cli.render import render

            self.lines(render(report))

    def object(self, value: Any) -> None:
        """One JSON object on one line, in ASCII: safe in every encoding and on every terminal."""
        text = json.dumps(_revealed_nothing(value, self._clean), ensure_ascii=True)
        self._write(self._stdout, text.replace("\x7f", "\\u007f") + "\n")

    def lines(self, lines: Iterable[Line]) -> None:
        """Lines of a result."""
        self._lines(self._stdout, lines)

    def message(self, lines: Iterable[Line]) -> None:
        """Lines that are not a result: errors, warnings."""
        self._lines(self._stderr, lines)

    def text(self, text: str) -> None:
        """Text of our own, such as help, as it stands."""
        self._write(self._stdout, text)

    def flush(self) -> None:
        """Bring out what is buffered, while errors can still be told.

        Raises:
            OutputLostError: It cannot be written; BrokenPipeError goes through as it is.
        """
        try:
            self._stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise OutputLostError(f"standard output cannot be written: {exc.strerror}") from exc

    @contextlib.contextmanager
    def progress(self, *, plain: bool = False) -> Iterator[Progress]:
        """What to tell progress to: bars on a terminal, else nothing, or a line a stage if ``plain``."""
        if _is_terminal(self._stderr):
            from torchrelay.cli.progress import bars

            with bars(self._stderr) as told:
                yield told
        else:
            yield self._stages() if plain else _silent

    def _stages(self) -> Progress:
        """A line when a stage begins; the next one says first how long that took."""
        seen: set[str] = set()
        began = time.monotonic()

        def told(stage: str, done: int, total: int) -> None:
            nonlocal began
            if stage in seen:
                return
            now = time.monotonic()
            if seen:
                self.message([Line(f"  took {duration(now - began)}", "dim")])
            seen.add(stage)
            began = now
            self.message([Line(f"{stage} …" if done < total or not total else stage)])

        return told

    def _lines(self, stream: TextIO, lines: Iterable[Line]) -> None:
        safe = [Line(printable(self._clean(line.text)), line.style) for line in lines]
        if _is_terminal(stream) and any(line.style for line in safe):
            _styled(stream, safe)
        else:
            self._write(stream, "".join(f"{line.text}\n" for line in safe))

    def _clean(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _write(self, stream: TextIO, text: str) -> None:
        encoding = stream.encoding or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise OutputLostError(f"standard output cannot be written: {exc.strerror}") from exc


def _revealed_nothing(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _revealed_nothing(item, clean) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_revealed_nothing(item, clean) for item in value]
    return value


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _silent(stage: str, done: int, total: int) -> None:
    """The progress that nobody looks at."""


def _styled(stream: TextIO, lines: Iterable[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        console.print(Text(line.text, style=_STYLES.get(line.style, "")))
