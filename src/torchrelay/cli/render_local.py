# SPDX-License-Identifier: Apache-2.0
"""Lines for the reports of commands that need no store; a part of :mod:`.render`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from torchrelay.cli.reports import ConfigReport, EnvReport, KeygenReport, KeyInfo, SettingInfo, TrustReport
from torchrelay.cli.text import Line, bounded, pairs, table
from torchrelay.reports import Report

Lines = list[Line]


def render(report: Report) -> Lines:
    """A report as lines for people."""
    return _RENDERERS[type(report)](report)


def keygen(report: KeygenReport) -> Lines:
    """A key pair."""
    rows = [("key id", report.key_id), ("public key", report.public_key), ("private key", report.file)]
    rows += [("public file", report.public_file)] if report.public_file else []
    here = "" if report.trusted else f"This machine: torchrelay trust add {shlex.quote(report.public_key)}"
    return [
        *([] if report.made else [Line("The key pair was there already; nothing was changed.", "dim")]),
        *pairs(rows),
        *([Line(here)] if here else []),
        Line(f"Machines that pull: torchrelay trust add {shlex.quote(report.public_key)}"),
    ]


def trust(report: TrustReport) -> Lines:
    """A trust policy."""
    lines = [Line(f"policy {report.policy}", "head")]
    if report.key_id:
        lines.append(Line(f"{_DID[report.action]} {report.key_id}", "good"))
    if not report.keys:
        lines.append(Line("trusts nobody: every pull refuses everything", "warn"))
    for key in report.keys:
        lines += _key(key)
    lines += [Line(f"{number} keys must agree on {name}") for name, number in report.thresholds.items()]
    return [*lines, *bounded([f"warning: {text}" for text in report.warnings], 0, "warn")]


def env(report: EnvReport) -> Lines:
    """This machine."""
    lines = pairs(
        [("environment", report.environment), *([("written to", report.file)] if report.file else [])]
    )
    for title, values in (("facets", report.facets), ("settings", report.settings), ("hints", report.hints)):
        lines += [Line(""), Line(title, "head"), *pairs(_texts(values), indent=2)]
    if report.exports:
        lines += [Line(""), Line("set these alike on every machine that shares the cache", "head")]
        lines += _exports(report.exports)
    if report.without_torchrelay:
        lines += [Line(""), Line("to start fast without torchrelay in the process that compiles", "head")]
        lines += _exports(report.without_torchrelay)
        lines += [Line(f"  {text}", "dim") for text in _WITHOUT_TORCHRELAY]
    return lines


_WITHOUT_TORCHRELAY = (
    "On builders and replicas alike: it is a part of PyTorch's keys, so one without it hits nothing of",
    "one with it, and a cold compile takes twice as long. With torchrelay.Relay there is nothing to set.",
)


def _exports(variables: Mapping[str, str]) -> Lines:
    return [Line(f"  export {name}={shlex.quote(value)}") for name, value in variables.items()]


def config(report: ConfigReport) -> Lines:
    """Every setting."""
    rows = [(name, _setting(found), _origin(found)) for name, found in report.settings.items()]
    file = report.file or "none found"
    lines = [*table(("setting", "value", "from"), rows), Line(f"configuration file: {file}", "dim")]
    return [*lines, *bounded([f"warning: {text}" for text in report.warnings], 0, "warn")]


_DID = {"add": "now trusted:", "remove": "no longer trusted:", "revoke": "refused from now on:"}


def _key(key: KeyInfo) -> Lines:
    if key.revoked:
        return [Line(f"{key.key_id}  {key.name}".rstrip(), "bad"), Line("  revoked: refused for ever", "dim")]
    state = "expired" if key.expired else ", ".join(key.roles)
    until = f", up to {key.not_after}" if key.not_after else ""
    name = f"  {key.name}" if key.name else ""
    where = f" for {' '.join(key.workloads)}" if key.workloads else ""
    lines = [Line(f"{key.key_id}{name}", "bad" if key.expired else "")]
    return [*lines, Line(f"  {state}{where}{until}", "dim"), Line(f"  {key.public_key}", "dim")]


def _texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, value if isinstance(value, str) else _joined(value)) for name, value in values.items()]


def _joined(value: Any) -> str:
    return " ".join(value) if isinstance(value, (list, tuple)) else str(value)


def _setting(found: SettingInfo) -> str:
    if isinstance(found.value, Mapping):
        return " ".join(f"{name}={path}" for name, path in found.value.items()) or "-"
    return "-" if found.value is None else str(found.value)


def _origin(found: SettingInfo) -> str:
    return (
        f"{found.origin} {found.source}".strip() if found.origin != "default" else found.source or "default"
    )


_RENDERERS: dict[type[Report], Callable[[Any], Lines]] = {
    KeygenReport: keygen,
    TrustReport: trust,
    EnvReport: env,
    ConfigReport: config,
}
