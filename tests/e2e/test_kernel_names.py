# SPDX-License-Identifier: Apache-2.0
"""The commands that torchrelay knows are those that this PyTorch writes, for every instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchrelay.caches import kernelname
from torchrelay.caches.kernelname import Naming, Source
from torchrelay.caches.prefixes import this_prefixes

pytestmark = pytest.mark.torch

PROGRAM = """
import json
from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa

commands = {}
for isa in (*cpu_vec_isa.supported_vec_isa_list, cpu_vec_isa.invalid_vec_isa):
    for headers in (True, False):
        config.cpp_cache_precompile_headers = headers
        flags = codecache.CppPythonBindingsCodeCache.cpp_compile_command_flags
        options = cpp_builder.CppTorchDeviceOptions(
            vec_isa=isa, device_type="cpu", extra_flags=(), use_relative_path=False, compile_only=False,
            min_optimize=False, **flags,
        )
        builder = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=options)
        commands[f"{type(isa).__name__} {headers}"] = builder.get_command_line()
source = " \\n int main;\\u00a0\\n"
names = {c: codecache.get_hash(source.strip(), f"None {c}") for c in commands.values()}
print(json.dumps({"commands": commands, "source": source, "names": names}))
"""
# Of other machines: PyTorch cannot be asked for their commands here.
FOREIGN = {"VecZVECTOR", "VecVSX"}


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    cache: Path = tmp_path_factory.mktemp("cache")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "CXX": "g++"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_command_is_known_and_gives_the_name(pytorch: Any) -> None:
    prefixes = this_prefixes()
    assert prefixes is not None
    naming = Naming((prefixes,))
    placed = {command for _, command in kernelname._candidates(naming)}
    known = {name: c for name, c in pytorch["commands"].items() if name.split()[0] not in FOREIGN}
    assert len(known) >= 8
    assert {name for name, command in known.items() if command not in placed} == set()
    source = Source(pytorch["source"].encode())
    for command in known.values():
        assert source.name(command) == pytorch["names"][command]
        found = naming.command_of(source, pytorch["names"][command])
        assert found is not None
        assert prefixes.expand(found) == command
