# SPDX-License-Identifier: Apache-2.0
"""The documentation is true: its code runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(#[^)]*)?\)")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[0] for match in LINK.findall(page.read_text(encoding="utf-8"))]
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_blocks_are_what_they_say(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "toml"):
        tomllib.loads(text)


CODE_SPAN = re.compile(r"`+([^`\n]+)`+")
SAID = re.compile(r"(?<![\w.\[/-])torchrelay ([a-z][a-z-]*)(?: ([a-z]+)\b)?")
PROSE = frozenset({"can", "cannot", "if", "in", "knows", "reads", "that", "trust policy"})
"""What follows the name of torchrelay in a sentence of a message."""


def said_in_pages() -> Iterator[tuple[str, str, str]]:
    """Each ``torchrelay <command> <word>`` in code of the documentation."""
    for page in PAGES:
        lines = [line for text in blocks(page, "", "bash", "sh", "console") for line in text.splitlines()]
        spans = CODE_SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
        for text in [*lines, *spans]:
            for command, word in SAID.findall(text.partition("#")[0]):
                yield name(page), command, word


def said_in_messages() -> Iterator[tuple[str, str, str]]:
    """Each one in a string of the source that is no docstring: messages, remedies, help."""
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for command, word in SAID.findall(node.value):
                    if PROSE.isdisjoint({command, f"{command} {word}"}):
                        yield name(path), command, word


SPOKEN = sorted({*said_in_pages(), *said_in_messages()})


def actions(command: str) -> frozenset[str]:
    """The words that the parser takes after a command, if it has any of its own."""
    from torchrelay.cli.commands import COMMANDS

    found = COMMANDS[command].parser()._subparsers
    chosen = found._group_actions[0].choices if found else ()
    return frozenset(chosen or ())


@pytest.mark.parametrize(("where", "command", "word"), SPOKEN)
def test_commands_exist(where: str, command: str, word: str) -> None:
    """A page or remedy that names one that is still to come sends people nowhere."""
    from torchrelay.cli.commands import COMMANDS

    assert command in COMMANDS
    if word and (known := actions(command)):
        assert word in known


def test_the_remedies_that_name_a_command_are_found() -> None:
    assert {where for where, _, _ in SPOKEN} >= {"README.md", "src/torchrelay/errors.py"}
    assert ("src/torchrelay/errors.py", "trust", "list") in SPOKEN


@pytest.mark.torch
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    page = ROOT / "docs/tutorials/two-machines.md"
    (program,) = blocks(page, "python")
    (tmp_path / "train.py").write_text(program)
    steps = list(blocks(page, ""))
    assert len(steps) == 5, "a step was added or taken away: look at this test"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON", "XDG_", "HOME"))}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"

    def shell(text: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    compiled, pushed, looked, shown, pulled = steps
    (first,) = re.findall(r"^export .*$", compiled, re.MULTILINE)
    shell(compiled)
    assert "pushed" in shell(f"{first}\n{pushed}")
    assert "inductor" in shell(f"{first}\n{looked}")
    (key,) = set(re.findall(r"ed25519:[A-Za-z0-9+/=]+", shell(f"{first}\n{shown}")))
    shell(pulled.replace("ed25519:…", key))
    before = {p.relative_to(tmp_path / "cache-one") for p in (tmp_path / "cache-one").rglob("*.so")}
    after = {p.relative_to(tmp_path / "cache-two") for p in (tmp_path / "cache-two").rglob("*.so")}
    assert after == before


TRAIN = """
def train():
    import torch
    print("trained", float(torch.compile(lambda x: x * 2 + 1)(torch.ones(64)).sum()))
"""


def run_the_readme(home: Path, store: Path) -> subprocess.CompletedProcess[str]:
    (text,) = blocks(ROOT / "README.md", "python")
    home.mkdir(exist_ok=True)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON", "XDG_"))}
    environ |= {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "cache")}
    program = TRAIN + text.replace("/srv/relay", str(store))
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300, check=True
    )


@pytest.mark.torch
def test_the_python_of_the_readme_runs_without_a_word_from_its_first_run_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = tmp_path / "store"
    done = run_the_readme(tmp_path / "home", store)
    assert done.stdout == "trained 192.0\n"
    assert "torchrelay" not in done.stderr, done.stderr
    assert list(store.glob("manifests/acme/llama-8b/*/*")), "what was compiled is pushed"


@pytest.mark.torch
def test_the_python_of_the_readme_runs_where_the_store_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = tmp_path / "store"
    store.write_text("in the way")
    done = run_the_readme(tmp_path / "home", store)
    assert done.stdout == "trained 192.0\n"
    assert "TorchrelayWarning" in done.stderr
    assert "is not a directory" in done.stderr
    assert store.read_text() == "in the way"
