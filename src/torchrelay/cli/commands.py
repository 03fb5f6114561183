# SPDX-License-Identifier: Apache-2.0
"""Which commands there are. Their modules are imported when they run, so that help is quick."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from torchrelay.cli.parser import Parser

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.reports import Report


class Module(Protocol):
    """What the module of a command has."""

    def arguments(self, parser: Parser) -> None:
        """Declare the command's options."""

    def run(self, args: argparse.Namespace, output: Output) -> Report:
        """Do it."""


class Command(NamedTuple):
    """A command: its name, its arguments in short, and what it does."""

    name: str
    usage: str
    summary: str

    @property
    def module(self) -> Module:
        """Its module, imported now."""
        return cast("Module", import_module(f"torchrelay.cli.{self.name.replace('-', '_')}"))

    def parser(self) -> Parser:
        """Its grammar."""
        parser = Parser(f"torchrelay {self.name}", usage=self.usage, description=self.summary)
        self.module.arguments(parser)
        return parser


GROUPS: tuple[tuple[str, tuple[Command, ...]], ...] = (
    (
        "Compile once, pass it on",
        (
            Command("demo", "[options]", "see the whole idea in a minute, on this machine"),
            Command("push", "[URL] [-w WORKLOAD] [options]", "publish what was compiled here, signed"),
            Command("pull", "[URL] [-w WORKLOAD] [options]", "verify and install what fits this machine"),
            Command("import-mega", "FILE [URL] [-w WORKLOAD] [options]", "publish a Mega-Cache blob"),
            Command(
                "export-mega", "FILE [URL] [-w WORKLOAD] [options]", "write what fits as a Mega-Cache blob"
            ),
        ),
    ),
    (
        "Look",
        (
            Command("status", "[URL] [-w WORKLOAD] [options]", "what a push and a pull would do"),
            Command("ls", "[URL] [-w WORKLOAD] [options]", "list the entries of a workload"),
            Command("show", "NAME [URL] [-w WORKLOAD] [options]", "all about the entries with a name"),
            Command("diff", "[URL] [-w WORKLOAD] [options]", "compare a workload with here or another"),
            Command("verify", "[URL] [-w WORKLOAD] [options]", "check every byte of a store, or of here"),
            Command("explain", "[URL] [-w WORKLOAD] [options]", "why entries fit this machine or do not"),
            Command("env", "[options]", "this machine's facets, and exports that make hits likely"),
            Command("config", "[URL] [options]", "every setting and where it came from"),
        ),
    ),
    (
        "Trust",
        (
            Command("keygen", "[options]", "make a key pair that signs"),
            Command("trust", "add|list|remove|revoke [options]", "whose entries are accepted"),
        ),
    ),
)

COMMANDS: dict[str, Command] = {command.name: command for _, group in GROUPS for command in group}
"""Every command, by name."""


def overview() -> str:
    """The text of ``torchrelay --help``."""
    width = max(map(len, COMMANDS))
    lines = ["usage: torchrelay COMMAND [options]", ""]
    for title, group in GROUPS:
        lines += [f"{title}:", *(f"  {c.name:<{width}}  {c.summary}" for c in group), ""]
    lines += [
        "`torchrelay COMMAND --help` tells more; `torchrelay --version` the version.",
        "Exit codes: 0 done, 1 damaged or missing, 2 usage, 3 refused by trust, 4 store unreachable.",
    ]
    return "\n".join(lines) + "\n"
