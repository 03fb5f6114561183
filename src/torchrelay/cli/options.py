# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay import config
from torchrelay.cli.text import Line
from torchrelay.errors import FormatError, RelayError, UsageError
from torchrelay.limits import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.config import Settings
    from torchrelay.environment import Environment
    from torchrelay.relay import Relay

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_AGO_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = re.compile(r"(\d{1,15})\s*(?:([KMGT])(?:iB|B)?|B)?", re.IGNORECASE)


def add_output(parser: Parser) -> None:
    """``--json``, and the file that configures."""
    group = parser.add_argument_group("output and configuration")
    group.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    group.add_argument("--config", metavar="FILE", help="read this file, instead of searching for one")


def add_store(parser: Parser) -> None:
    """``URL``, ``-w``, the directories, and what decides on trust."""
    parser.add_argument("url", nargs="?", metavar="URL", help="the store: a path or a URL [TORCHRELAY_URL]")
    parser.add_argument(
        "-w",
        "--workload",
        metavar="WORKLOAD",
        help="name that entries are published under, such as acme/llama/prod",
    )
    group = parser.add_argument_group("directories")
    group.add_argument(
        "--cache-dir", metavar="DIR", help="PyTorch's compile caches [TORCHINDUCTOR_CACHE_DIR]"
    )
    group.add_argument("--triton-cache-dir", metavar="DIR", help="Triton's own cache [TRITON_CACHE_DIR]")
    group.add_argument(
        "--tree",
        metavar="NAME=PATH",
        action="append",
        dest="trees",
        help="a framework's own cache; may be repeated",
    )
    add_trust(parser)


def add_trust(parser: Parser) -> None:
    """``--key``, ``--policy`` and ``--state-dir``."""
    group = parser.add_argument_group("trust")
    group.add_argument("--key", metavar="FILE", help="private key that signs [this user's own]")
    group.add_argument("--policy", metavar="FILE", help="trust policy: who may sign what [this user's own]")
    group.add_argument("--state-dir", metavar="DIR", help="where it is remembered what a store held")


def add_environment(parser: Parser) -> None:
    """``--environment FILE``."""
    parser.add_argument(
        "--environment",
        metavar="FILE",
        help="for another machine: what `torchrelay env --out FILE` wrote there",
    )


def load_settings(args: argparse.Namespace, output: Output) -> Settings:
    """The settings of a run; warnings are printed, secrets are concealed from here on.

    Raises:
        UsageError: A setting cannot be used.
    """
    output.conceal(config.secrets_of(getattr(args, "url", None)))
    output.conceal(config.secrets_of(os.environ.get("TORCHRELAY_URL")))
    phrase = os.environ.get("TORCHRELAY_KEY_PASSPHRASE", "")
    output.conceal([phrase] if len(phrase) >= config.SHORTEST_SECRET else [])
    settings = config.load(vars(args), config=args.config)
    output.conceal(config.secrets_of(settings.url.value))
    output.message(Line(f"warning: {text}", "warn") for text in settings.warnings)
    return settings


def open_relay(args: argparse.Namespace, output: Output) -> Relay:
    """The store that options and settings name.

    Raises:
        UsageError: No store or workload is named, or a setting cannot be used.
    """
    return relay_of(load_settings(args, output))


def relay_of(settings: Settings) -> Relay:
    """The store that the settings name, seen with this user's key and policy.

    Raises:
        UsageError: No store or workload is named, or a setting cannot be used.
    """
    url, workload = settings.require_url(), settings.require_workload()
    from torchrelay.relay import Relay

    return Relay(
        url,
        workload=workload,
        cache_dir=settings.cache_dir.value,
        triton_cache_dir=settings.triton_cache_dir.value,
        trees=dict(settings.trees.value),
        key=settings.key.value,
        policy=settings.policy.value,
        state_dir=settings.state_dir.value,
        in_process=False,
        strict=True,
    )


@contextlib.contextmanager
def telling_of_a_new_key(settings: Settings, output: Output) -> Iterator[None]:
    """Say so, and what others need, if what runs inside made this user's key pair; also if it fails."""
    from torchrelay.signing.keyfiles import KEY_NAME, config_directory, load_private_key, passphrase_from

    path = None
    with contextlib.suppress(RelayError):  # whoever needs the directory will say what is wrong with it
        named = settings.key.value is not None
        path = None if named else config_directory(os.environ) / KEY_NAME
    if path is None or os.path.lexists(path):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(RelayError):
            key = load_private_key(path, passphrase_from(os.environ)).public_key
            output.message(
                [
                    Line(f"made a key pair for you, {path}, and trusted it here"),
                    Line(f"  on every machine that pulls: torchrelay trust add {shlex.quote(key.text)}"),
                ]
            )


def read_environment(name: str | None) -> Environment | None:
    """The environment in a file given with ``--environment``.

    Raises:
        UsageError: The file cannot be read or holds none.
    """
    if name is None:
        return None
    from torchrelay.environment import parse_environment

    remedy = "Write it on the machine concerned with `torchrelay env --out FILE`."
    try:
        with Path(name).open("rb") as stream:
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
        return parse_environment(data.rstrip(b"\n"), name=name)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(f"{name} cannot be read: {reason}", remedy=remedy, subject=name) from exc
    except FormatError as exc:
        raise UsageError(exc.message, remedy=remedy, subject=name) from exc


def moment(text: str) -> float:
    """``2h`` (ago), ``@1767225600``, or an ISO date or time, as seconds since the epoch.

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return datetime.now(timezone.utc).timestamp() - float(ago[1]) * _AGO_SECONDS[ago[2]]
    try:
        if text.startswith("@"):
            seconds = float(text[1:])
        else:
            # Python 3.10 does not read the Z. A time without a zone is meant as the clock on the wall.
            seconds = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError, OSError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; write 2h (ago), 2026-01-31, 2026-01-31T12:00 or @1767225600"
        )
    return seconds


def byte_count(text: str) -> int:
    """``500000``, ``64K``, ``10M``, ``2GiB``: powers of 1024.

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    match = _BYTES.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 500000, 64K, 10M or 2G")
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return int(match[1]) << 10 * power


def entry_count(text: str) -> int:
    """A number of entries.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of entries")
    return int(text)
