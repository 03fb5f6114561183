# SPDX-License-Identifier: Apache-2.0
"""Machines for end-to-end tests: each a user, a home and a cache path of its own, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Machine:
    """One machine that compiles, pushes and pulls through the command line.

    Attributes:
        base: Its directory.
        user: Its user's name; builders share one, so that headers are precompiled once for all.
        variables: Further environment variables.
    """

    base: Path
    user: str = "torchrelay-tests"
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.base / f"cache-{self.user}"

    @property
    def environ(self) -> dict[str, str]:
        (self.base / "home").mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON", "XDG_"))}
        return kept | {
            "HOME": str(self.base / "home"),
            "USER": self.user,
            "LOGNAME": self.user,
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            **self.variables,
        }

    def python(self, *arguments: str) -> dict[str, Any]:
        """Run a program that prints one JSON object as its last line."""
        command = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def model(self, *arguments: str) -> dict[str, Any]:
        """Compile and run a model of ``models.py``."""
        return self.python(str(HERE / "models.py"), *arguments)

    def shapes(self, name: str, size: int) -> dict[str, Any]:
        """Compile and run one of ``shapes.py``."""
        return self.python(str(HERE / "shapes.py"), name, str(size))

    def relay(self, command: str, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run ``torchrelay COMMAND … --json`` and expect an exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "torchrelay", command, *arguments, "--json"],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == code, f"{done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def trusts(self, other: Machine) -> None:
        """Add the other machine's public key."""
        public = other.relay("keygen")["public_key"] if not other.has_key else other.public_key
        self.relay("trust", "add", public)

    @property
    def has_key(self) -> bool:
        return (self.base / "home/.config/torchrelay/key.pem").exists()

    @property
    def public_key(self) -> str:
        from torchrelay.signing.keyfiles import load_private_key

        return load_private_key(self.base / "home/.config/torchrelay/key.pem").public_key.text
