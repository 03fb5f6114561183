# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from torchrelay import cli
from torchrelay.reports import (
    DiffReport,
    ExplainReport,
    ListReport,
    PullReport,
    PushReport,
    StatusReport,
    VerifyReport,
)


@dataclass
class Ran:
    """What one run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        lines = self.out.splitlines()
        assert len(lines) == 1, f"not one object on one line: {self.out!r}"
        return json.loads(lines[0])


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user with nothing: no keys, no settings, an empty current directory."""
    for name in list(os.environ):
        if name.startswith(("TORCHRELAY_", "TORCHINDUCTOR_", "TRITON_", "XDG_")):
            monkeypatch.delenv(name)
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(mode=0o700)
    here.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(here)
    return home


@pytest.fixture
def run(capsys):
    """Run ``torchrelay`` in this process."""

    def ran(*argv: str) -> Ran:
        code = cli.main(argv)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return ran


EMPTY = {
    "push": PushReport(),
    "pull": PullReport(),
    "status": StatusReport(),
    "entries": ListReport(),
    "show": ListReport(),
    "diff": DiffReport(),
    "verify": VerifyReport(),
    "explain": ExplainReport(),
    "import_mega": PushReport(),
    "export_mega": PullReport(),
}


@dataclass
class FakeRelay:
    """Answers with what a test put in, and remembers what it was asked."""

    answer: Any = None
    asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)

    def __call__(self, url, **made):
        self.made = {"url": url, **made}
        return self

    def __getattr__(self, name):
        def asked(*args, **kwargs):
            self.asked.append((name, args, kwargs))
            if isinstance(self.answer, BaseException):
                raise self.answer
            return EMPTY[name] if self.answer is None else self.answer

        return asked


@pytest.fixture
def relay(monkeypatch):
    """A facade without a store behind it, for what the command line alone decides."""
    fake = FakeRelay()
    monkeypatch.setattr("torchrelay.relay.Relay", fake)
    return fake
