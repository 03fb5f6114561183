# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay import __version__, errors
from torchrelay.cli import failures, main
from torchrelay.cli.commands import COMMANDS
from torchrelay.cli.parser import Parser
from torchrelay.reports import Problem, PullReport, PushReport, StatusReport, VerifyReport

GOLDEN = Path(__file__).parent / "golden"
STORE = ("/srv/relay", "-w", "acme/x")
PROBLEM = [Problem(subject="blobs/aa/bb", reason="damaged")]


# --- help -------------------------------------------------------------------------------------

HELPS = {
    "torchrelay": ("--help",),
    **{name: (name, "--help") for name in COMMANDS},
    **{f"trust-{action}": ("trust", action, "--help") for action in ("add", "list", "remove", "revoke")},
}


@pytest.mark.parametrize("name", HELPS)
def test_help_is_what_it_was(run, name, request):
    """The text is the same on every version of Python; `UPDATE_GOLDEN=1` writes it anew."""
    ran = run(*HELPS[name])
    assert (ran.code, ran.err) == (0, "")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(ran.out, encoding="utf-8")
    assert ran.out == path.read_text(encoding="utf-8")


def test_every_golden_help_belongs_to_a_command():
    assert {path.stem for path in GOLDEN.iterdir()} == set(HELPS)


def test_no_argument_at_all_shows_help_and_is_a_usage_error(run):
    ran = run()
    assert ran.code == 2
    assert ran.out == run("--help").out


def test_version(run):
    assert run("--version").out == f"torchrelay {__version__}\n"


def test_the_commands_of_the_contract_are_there():
    assert set(COMMANDS) == {
        *("push", "pull", "status", "ls", "show", "diff", "verify", "explain", "env", "config"),
        *("keygen", "trust", "import-mega", "export-mega", "demo"),
    }


FLAGS = {
    "push": "--cache-dir --triton-cache-dir --tree --all --since --own --replace --repair "
    "--assume-environment --max-bytes --max-entries --dry-run --json -w --workload --key --policy",
    "pull": "--cache-dir --triton-cache-dir --environment --deadline --json -w --workload --policy",
    "verify": "--local --json",
    "env": "--out --json",
    "keygen": "--json",
}


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_the_contract_are_there(name):
    assert set(FLAGS[name].split()) <= set(COMMANDS[name].parser()._options())


# --- exit codes -------------------------------------------------------------------------------

ERRORS = [
    (errors.UsageError("m", remedy="r"), 2),
    (errors.KeyFileError("m"), 2),
    (errors.StampError("m", remedy="r"), 2),
    (errors.UnsafeDirectoryError("m", remedy="r"), 2),
    (errors.StorageError("m"), 4),
    (errors.NotFoundError("m"), 4),
    (errors.DeniedError("m"), 4),
    (errors.TransientError("m"), 4),
    (errors.PermanentError("m"), 4),
    (errors.TooLargeError("m"), 4),
    (errors.TrustError("m"), 3),
    (errors.DamagedError("m"), 1),
    (errors.FormatError("m"), 1),
    (errors.InstallError("m"), 1),
    (KeyboardInterrupt(), 130),
    (RuntimeError("m"), 1),
    (RecursionError("m"), 1),
    (MemoryError(), 1),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_becomes_its_exit_code_a_message_and_a_remedy(run, relay, error, code):
    relay.answer = error
    ran = run("pull", *STORE)
    assert ran.code == code
    assert ran.out == ""
    first, second, *_ = ran.err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("  ")
    assert second.strip()
    assert "Traceback" not in ran.err


def test_every_family_of_errors_has_an_exit_code():
    """A new branch of the tree must be given a code on purpose, not fall into the default."""
    families = {kind for kind in errors.RelayError.__subclasses__() if kind.__module__ == errors.__name__}
    assert families == {kind for kind, _ in failures._CODES}


REPORTS = [
    ("push", PushReport(), 0),
    ("push", PushReport(failed=PROBLEM), 1),
    ("push", PushReport(refused=PROBLEM, damaged=PROBLEM), 0),
    ("pull", PullReport(installed=3), 0),
    ("pull", PullReport(incompatible={"cpu_isa": 3}), 0),
    ("pull", PullReport(damaged=PROBLEM), 1),
    ("pull", PullReport(missing=PROBLEM), 1),
    ("pull", PullReport(refused=PROBLEM), 3),
    ("pull", PullReport(refused=PROBLEM, damaged=PROBLEM), 3),
    ("status", StatusReport(refused=PROBLEM), 3),
    ("verify", VerifyReport(damaged=PROBLEM), 1),
    ("verify", VerifyReport(missing=PROBLEM), 1),
    ("verify", VerifyReport(refused=PROBLEM), 3),
    ("verify", VerifyReport(good=1, unsigned=4), 0),
]


@pytest.mark.parametrize(("command", "report", "code"), REPORTS)
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_report_becomes_its_exit_code(run, relay, command, report, code, json):
    relay.answer = report
    assert run(command, *STORE, *json).code == code


@pytest.mark.parametrize(
    "argv",
    [
        ("psh",),
        ("--json", "push"),
        ("push", "--wrkload", "x"),
        ("push", "--work", "x"),
        ("push", *STORE, "extra"),
        ("push",),
        ("push", "/srv/relay"),
        ("push", *STORE, "--all", "--since", "1h"),
        ("push", *STORE, "--since", "yesterday"),
        ("push", *STORE, "--since", "@nan"),
        ("push", *STORE, "--max-bytes", "-1"),
        ("push", *STORE, "--max-bytes", "many"),
        ("push", *STORE, "--max-entries", "1.5"),
        ("push", *STORE, "--assume-environment", "other"),
        ("push", *STORE, "--tree", "vllm"),
        ("push", *STORE, "--key", ""),
        ("push", *STORE, "--kye", "k.pem"),
        ("push", *STORE, "--key=k.pem", "--no-sign"),
        ("push", *STORE, "--config", "nowhere.toml"),
        ("pull", *STORE, "--deadline", "0"),
        ("pull", *STORE, "--environment", "nowhere.json"),
        ("show",),
        ("import-mega",),
        ("trust",),
        ("trust", "ad"),
        ("trust", "list", "x"),
        ("trust", "add", "k", "--not-after", "soon"),
        ("trust", "remove"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_done(run, relay, argv):
    ran = run(*argv)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) == 2
    assert relay.asked == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_option_is_refused_with_its_near_match(run, relay, command):
    argv = ("trust", "list") if command == "trust" else (command,)
    needed = {"show": ("x",), "import-mega": ("x",), "export-mega": ("x",)}.get(command, ())
    ran = run(*argv, *needed, "--jsn")
    assert ran.code == 2
    assert "has no option --jsn" in ran.err
    assert "Did you mean --json?" in ran.err
    assert relay.asked == []


@pytest.mark.parametrize("variable", ["TORCHRELAY_KEI", "TORCHRELAY_SIGNING_KEY", "TORCH_RELAY_KEY"])
def test_push_with_a_misspelt_variable_for_the_key_is_refused_before_any_upload(
    run, relay, monkeypatch, variable
):
    """Field case X06: signing silently off."""
    monkeypatch.setenv(variable, "/k.pem")
    ran = run("push", *STORE)
    assert ran.code == 2
    assert variable in ran.err
    assert relay.asked == []
    assert relay.made == {}


# --- JSON -------------------------------------------------------------------------------------


def test_an_error_with_json_is_one_object_on_stdout_and_the_text_on_stderr(run, relay):
    relay.answer = errors.TrustError("the key is revoked", remedy="Use another.", subject="abc")
    ran = run("pull", *STORE, "--json")
    error = {"code": 3, "message": "the key is revoked", "remedy": "Use another.", "subject": "abc"}
    assert ran.json == {"error": error}
    assert "the key is revoked" in ran.err


def test_a_usage_error_with_json_is_an_object_too(run):
    assert run("push", "--wrkload", "x", "--json").json["error"]["code"] == 2


def test_warnings_do_not_disturb_json(run, relay, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_URI", "x")
    ran = run("pull", *STORE, "--json")
    assert ran.json["installed"] == 0
    assert "TORCHRELAY_URI is unknown" in ran.err


# --- what must never be shown -----------------------------------------------------------------

SECRET_URL = "redis://ann:gehe%2Fim99@host/0?token=verysecrettoken"
SECRETS = ("gehe%2Fim99", "gehe/im99", "verysecrettoken")


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("where", ["flag", "variable", "file"])
@pytest.mark.parametrize("json", [(), ("--json",)])
@pytest.mark.parametrize("kind", [errors.StorageError, RuntimeError])
def test_credentials_are_not_shown_by_any_error(run, relay, monkeypatch, where, debug, json, kind):
    monkeypatch.setenv("TORCHRELAY_DEBUG", debug)
    argv = ["pull", "-w", "acme/x", *json]
    if where == "flag":
        argv.insert(1, SECRET_URL)
    elif where == "variable":
        monkeypatch.setenv("TORCHRELAY_URL", SECRET_URL)
    else:
        Path("torchrelay.toml").write_text(f'url = "{SECRET_URL}"\n')
    relay.answer = kind(f"cannot reach {SECRET_URL}: login with gehe/im99 failed, token=verysecrettoken")
    ran = run(*argv)
    assert relay.made["url"] == SECRET_URL
    assert not any(secret in ran.out + ran.err for secret in SECRETS)
    assert ("Traceback" in ran.err) == bool(debug)


@pytest.mark.parametrize(
    "argv", [("pull", SECRET_URL, "extra"), ("pull", "--deadline", SECRET_URL), (SECRET_URL,)]
)
def test_credentials_are_not_shown_by_usage_errors(run, argv):
    ran = run(*argv)
    assert ran.code == 2
    assert not any(secret in ran.err for secret in ("gehe%2Fim99", "verysecrettoken"))


def test_config_redacts_credentials(run, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_URL", SECRET_URL)
    monkeypatch.setenv("TORCHRELAY_KEY_PASSPHRASE", "open sesame")
    for argv in (("config",), ("config", "--json")):
        ran = run(*argv)
        assert ran.code == 0
        assert "redis://ann:***@host/0" in ran.out
        assert not any(secret in ran.out + ran.err for secret in (*SECRETS, "open sesame"))


def test_a_pass_phrase_is_not_shown_by_any_error(run, relay, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_KEY_PASSPHRASE", "open sesame")
    monkeypatch.setenv("TORCHRELAY_DEBUG", "1")
    relay.answer = RuntimeError("wrong: open sesame")
    assert "open sesame" not in run("push", *STORE).err


def test_an_internal_error_says_so_and_how_to_report_it(run, relay):
    relay.answer = ZeroDivisionError("division by zero")
    ran = run("status", *STORE)
    assert ran.code == 1
    assert "internal error: ZeroDivisionError: division by zero" in ran.err
    assert "TORCHRELAY_DEBUG=1" in ran.err


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_control_characters_of_errors_do_not_reach_the_terminal(run, relay, json):
    relay.answer = errors.DamagedError(
        "bad \x1b]0;owned\x07 name\r\u202e \x9b31m\nerror: second", remedy="r\x1b[2J"
    )
    ran = run("pull", *STORE, *json)
    shown = ran.out + ran.err
    assert not any(ord(c) < 32 and c != "\n" for c in shown)
    assert "\u202e" not in shown
    assert "\x9b" not in shown
    assert len(ran.err.splitlines()) == 2, "a line feed in a message must not make a line of its own"


# --- as a process -----------------------------------------------------------------------------


def process(*argv, **more):
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "backends")])}
    environ.update(more.pop("environ", {}))
    return subprocess.run(
        [sys.executable, *argv], env=environ, capture_output=True, text=True, timeout=60, check=False, **more
    )


def test_python_m_returns_the_exit_code():
    ran = process("-m", "torchrelay", "push", "--wrkload")
    assert ran.returncode == 2
    assert "Did you mean --workload?" in ran.stderr
    assert process("-m", "torchrelay", "--version").stdout == f"torchrelay {__version__}\n"


def test_a_reader_that_went_away_is_no_error_to_talk_about(tmp_path):
    """`torchrelay config | head -0`: quiet, also when the interpreter ends."""
    read, write = os.pipe()
    os.close(read)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "torchrelay", "--help"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [("config",), ("config", "--json"), ("--help",)])
def test_a_result_that_cannot_be_written_is_told(argv):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "torchrelay", *argv],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 1
    assert "standard output cannot be written" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "argv", [("config", "/srv/r\u00e9lay-\u2603"), ("config", "/srv/r\u00e9lay-\u2603", "--json")]
)
def test_output_in_an_encoding_without_the_characters_is_escaped(argv):
    ran = process("-m", "torchrelay", *argv, environ={"PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0, ran.stderr
    assert "\\u2603" in ran.stdout


def test_help_and_import_load_nothing_heavy():
    """The budget is 50 ms for the import and 200 ms for help; modules are counted, not milliseconds."""
    heavy = {"torch", "msgspec", "cryptography", "rich", "fsspec", "asyncio", "cyclopts", "hypothesis"}
    for code in ("import torchrelay", "from torchrelay.cli import main; main(['--help'])"):
        ran = process("-c", f"{code}; import sys; print(*sys.modules, sep='\\n', file=sys.stderr)")
        assert ran.returncode == 0
        assert heavy & set(ran.stderr.split()) == set()


# --- help asked for below a command -----------------------------------------------------------


def test_nothing_is_abbreviated():
    parser = Parser("x")
    parser.add_argument("--key")
    with pytest.raises(errors.UsageError, match="no option --ke"):
        parser.read(["--ke", "v"])


def test_main_never_raises(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torchrelay", "\udcff"])
    assert main() == 2
