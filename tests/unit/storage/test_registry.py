# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

from torchrelay.errors import UsageError
from torchrelay.storage import Backend, Location, backend_class, installed_schemes, open_backend

PLUGIN = """
from torchrelay_memory import MemoryBackend
class Plugin(MemoryBackend):
    pass
not_a_backend = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution that registers backends on the path, as an installed one would be."""

    def install(name, **points):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{scheme} = {value}\n" for scheme, value in points.items())
        (info / "entry_points.txt").write_text(f"[torchrelay.backends]\n{lines}")

    (tmp_path / "relay_test_plugin.py").write_text(PLUGIN)
    (tmp_path / "relay_test_needy.py").write_text("import relay_test_no_such_module\n")
    (tmp_path / "relay_test_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for module in [name for name in sys.modules if name.startswith("relay_test_")]:
        del sys.modules[module]


def test_our_own_backends_are_found_like_a_strangers():
    assert {"file", "memory"} <= set(installed_schemes())
    assert issubclass(backend_class("file"), Backend)


def test_a_strangers_backend_is_found(install):
    install("stranger", strange="relay_test_plugin:Plugin")
    assert "strange" in installed_schemes()
    assert "relay_test_plugin" not in sys.modules, "looking for names imports nothing"
    backend = open_backend("strange://x")
    assert type(backend).__name__ == "Plugin"
    assert open_backend(Location.parse("STRANGE://x")).describe()


def test_an_unknown_scheme_lists_what_is_installed():
    with pytest.raises(UsageError) as caught:
        open_backend("nosuch://me:hunter2@host/x")
    assert "file" in caught.value.message
    assert "memory" in caught.value.message
    assert "hunter2" not in caught.value.diagnostics()


def test_two_owners_of_one_scheme_are_refused_when_it_is_opened(install):
    install("one", strange="relay_test_plugin:Plugin")
    install("two", strange="relay_test_other:Plugin", fine="relay_test_plugin:Plugin")
    with pytest.raises(UsageError, match=r"several.*relay_test_other:Plugin, relay_test_plugin:Plugin"):
        open_backend("strange://x")
    open_backend("fine://x")


def test_the_same_registration_twice_is_harmless(install):
    install("one", strange="relay_test_plugin:Plugin")
    install("two", strange="relay_test_plugin:Plugin")
    open_backend("strange://x")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("relay_test_needy:Plugin", "relay_test_no_such_module"),
        ("relay_test_broken:Plugin", "division by zero"),
        ("relay_test_plugin:absent", "absent"),
        ("relay_test_plugin:not_a_backend", "is not a Backend"),
    ],
)
def test_a_backend_that_cannot_be_loaded_says_why(install, value, says):
    install("stranger", strange=value)
    with pytest.raises(UsageError, match=says) as caught:
        open_backend("strange://x")
    assert caught.value.remedy


def test_importing_storage_imports_no_backend_and_no_test_tool():
    script = "import sys, torchrelay.storage; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    unwanted = {"torchrelay_local", "torchrelay_memory", "pytest", "hypothesis", "torch"}
    modules = done.stdout.split()
    assert "torchrelay.storage" in modules
    assert not [m for m in modules if m.split(".")[0] in unwanted or m.startswith("torchrelay.testing")]
