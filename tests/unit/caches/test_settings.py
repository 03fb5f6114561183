# SPDX-License-Identifier: Apache-2.0
"""Key-affecting settings are read as PyTorch would, and only a harmless one is followed."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchrelay.caches import settings
from torchrelay.environment import SETTINGS

HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which torch is there and nothing of it but the top is imported."""
    for module in {module for module, _ in settings._MODULES.values()} | {"torch._dynamo.convert_frame"}:
        monkeypatch.delitem(sys.modules, module, raising=False)
    for setting in SETTINGS.values():
        if setting.variable:
            monkeypatch.setenv(setting.variable, "")  # so that it is put back
            monkeypatch.delenv(setting.variable)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 6))  # type: ignore[arg-type]


def configure(monkeypatch: pytest.MonkeyPatch, **values: Any) -> ModuleType:
    module = ModuleType("torch._inductor.config")
    module.__dict__.update({"cpp_cache_precompile_headers": True, "cpp": SimpleNamespace(), **values})
    monkeypatch.setitem(sys.modules, "torch._inductor.config", module)
    return module


def test_defaults_without_inductor() -> None:
    assert settings.this_settings() == {
        name: "6" if setting.default is None else setting.default for name, setting in SETTINGS.items()
    }


def test_variables_decide_before_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, "0")
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "v2")
    monkeypatch.setenv("CXX", "clang++")
    found = settings.this_settings()
    assert (found["precompile_headers"], found["cache_key_tag"], found["cpp_compiler"]) == (
        "0",
        "v2",
        "clang++",
    )


def test_the_configuration_decides_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, "1")
    configure(
        monkeypatch,
        cpp_cache_precompile_headers=False,
        max_autotune=True,
        cpp=SimpleNamespace(march="x86-64-v3", threads=3, simdlen=256),
    )
    found = settings.this_settings()
    assert (found["precompile_headers"], found["max_autotune"]) == ("0", "1")
    assert (found["cpp_march"], found["threads"]) == ("x86-64-v3", "3")
    assert settings.simdlen() == 256


def test_an_unset_march_is_native_and_unset_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cpp=SimpleNamespace(march=None, threads=-1, simdlen=None))
    found = settings.this_settings()
    assert (found["cpp_march"], found["threads"], settings.simdlen()) == ("native", "6", None)


def test_a_workloads_setting_is_followed_before_inductor_is_imported() -> None:
    assert settings.apply_settings({"precompile_headers": "0"}) == {"precompile_headers": "0"}
    assert os.environ[HEADERS] == "0"
    assert settings.this_settings()["precompile_headers"] == "0"


def test_a_workloads_setting_is_followed_after_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(monkeypatch)
    assert settings.apply_settings({"precompile_headers": "0"}) == {"precompile_headers": "0"}
    assert config.cpp_cache_precompile_headers is False
    assert os.environ[HEADERS] == "0"


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {"precompile_headers": "1"},  # as it is already
        {"precompile_headers": "yes"},
        {"precompile_headers": ""},
        {"threads": "1"},
        {"cpp_compiler": "/tmp/evil"},
        {"cache_key_tag": "v2"},
        {"cpp_march": "native -fplugin=/tmp/evil.so"},
        {"max_autotune": "1", "freezing": "1", "LD_PRELOAD": "/tmp/evil.so"},
    ],
)
def test_nothing_else_is_ever_taken_from_a_store(
    monkeypatch: pytest.MonkeyPatch, recorded: dict[str, str]
) -> None:
    config = configure(monkeypatch)
    variables, values = dict(os.environ), dict(config.__dict__)
    assert settings.apply_settings(recorded) == {}
    assert dict(os.environ) == variables
    assert config.__dict__ == values


def test_the_user_comes_before_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, "1")
    assert settings.apply_settings({"precompile_headers": "0"}) == {}
    assert os.environ[HEADERS] == "1"


def test_after_the_first_compile_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(monkeypatch)
    frames = ModuleType("torch._dynamo.convert_frame")
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", frames)
    for counter, applied in ((1, {}), (0, {"precompile_headers": "0"})):
        frames.FRAME_COUNTER = counter  # type: ignore[attr-defined]
        assert settings.apply_settings({"precompile_headers": "0"}) == applied
        assert config.cpp_cache_precompile_headers is not applied


def test_the_recommendation_is_one_that_processes_follow() -> None:
    assert set(settings.WITHOUT_TORCHRELAY) <= set(settings.FOLLOWED)
    assert settings.recommended_exports() == {HEADERS: "0"}


# --- headers that no kernel needs -----------------------------------------------------------------


class Codecache:
    """The shape of ``torch._inductor.codecache`` that the wrapper relies on."""

    def __init__(self, local: str = "main_path") -> None:
        self.made: list[str] = []
        module = ModuleType("torch._inductor.codecache")

        @functools.cache
        def _precompile_header(header: str, command: str, **options: Any) -> str:
            self.made.append(header)
            return f"/headers/{header}"

        module._precompile_header = _precompile_header  # type: ignore[attr-defined]
        program = f"""
class CppCodeCache:
    @classmethod
    def load_async(cls, source):
        {local} = source
        main_build_option = _precompile_header("prefix.h", "g++ " + source, min_optimize=False)
        return main_build_option

def aot(source):
    main_path = main_build_option = source
    return _precompile_header("prefix.h", "aot " + source)
"""
        exec(program, module.__dict__)
        self.module = module


def install(monkeypatch: pytest.MonkeyPatch, codecache: Codecache) -> bool:
    inductor = ModuleType("torch._inductor")
    inductor.codecache = codecache.module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", codecache.module)
    return settings.skip_needless_headers()


def test_a_header_is_made_only_for_a_kernel_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codecache = Codecache()
    assert install(monkeypatch, codecache)
    load = codecache.module.CppCodeCache.load_async
    (tmp_path / "there.main.so").write_bytes(b"x")
    assert load(str(tmp_path / "there.main.cpp")) == ""
    assert codecache.made == []
    assert load(str(tmp_path / "absent.main.cpp")) == "/headers/prefix.h"
    assert codecache.made == ["prefix.h"]


def test_aot_inductor_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codecache = Codecache()
    assert install(monkeypatch, codecache)
    (tmp_path / "there.main.so").write_bytes(b"x")
    assert codecache.module.aot(str(tmp_path / "there.main.cpp")) == "/headers/prefix.h"


def test_it_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = Codecache()
    assert install(monkeypatch, codecache)
    first = codecache.module._precompile_header
    assert settings.skip_needless_headers()
    assert codecache.module._precompile_header is first
    first.cache_clear()
    assert first.cache_info().currsize == 0


def test_another_torch_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = Codecache(local="source_path")
    before = codecache.module._precompile_header
    assert not install(monkeypatch, codecache)
    assert codecache.module._precompile_header is before
    del codecache.module._precompile_header
    assert not settings.skip_needless_headers()
    monkeypatch.setitem(sys.modules, "torch._inductor", None)
    assert not settings.skip_needless_headers()


def test_the_frame_is_recognised_by_its_code() -> None:
    code = compile("main_path = main_build_option = 1", "x", "exec")
    assert isinstance(code, CodeType)
    assert not settings._kernel_exists(sys._getframe(), code)
