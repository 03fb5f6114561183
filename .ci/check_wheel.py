# SPDX-License-Identifier: Apache-2.0
"""What must hold of the built wheel, run in an environment that has nothing but the wheel."""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

files = [str(file) for file in importlib.metadata.files("torchrelay") or []]
assert not any(file.startswith(("tests/", "benchmarks/")) for file in files), "the wheel holds tests"
for needed in ("torchrelay/py.typed", "torchrelay/cli/__init__.py", "torchrelay_local/__init__.py"):
    assert needed in files, f"the wheel lacks {needed}"

import torchrelay  # noqa: E402
from torchrelay.storage import open_backend  # noqa: E402

assert "site-packages" in torchrelay.__file__, "not the wheel was imported"
assert torchrelay.__version__ == importlib.metadata.version("torchrelay"), "two versions"

with tempfile.TemporaryDirectory() as folder, open_backend(f"{folder}/store", create=True) as backend:
    backend.put("environments/" + "0" * 64, b"{}")
    assert [info.size for info in backend.list("environments/")] == [2]

script = Path(sys.executable).parent / "torchrelay"
for arguments in (["--version"], ["--help"], ["push", "--help"], ["keygen", "--help"]):
    subprocess.run([script, *arguments], check=True, stdout=subprocess.DEVNULL)
print("the wheel is good:", len(files), "files")
