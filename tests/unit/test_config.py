# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import getpass
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay import config
from torchrelay.errors import KeyFileError, UnsafeDirectoryError, UsageError
from torchrelay.signing import keyfiles

WHERE = {"url": "URL", "trees": "--tree"}


def load(tmp_path, flags=None, environ=None, **more):
    return config.load(flags, environ={"USER": "ann", **(environ or {})}, directory=tmp_path, **more)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


# --- precedence -------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", config.SETTINGS, ids=lambda s: s.name)
def test_flag_beats_variable_beats_file_beats_default(tmp_path, setting):
    def given_as(word):
        if setting.name == "deadline":
            return str({"flag": 1, "variable": 2, "file": 3}[word])
        return f"{word}=/{word}" if setting.name == "trees" else f"/{word}"

    file = {"deadline": "3", "trees": '{file = "/file"}'}.get(setting.name, '"/file"')
    path = write(tmp_path / "torchrelay.toml", f"{setting.name} = {file}\n")
    flags, environ = {setting.attribute: given_as("flag")}, {setting.variable: given_as("variable")}

    def found(**layers):
        value = getattr(load(tmp_path, **layers), setting.attribute)
        return value.layer, value.source

    assert found(flags=flags, environ=environ) == ("flag", setting.flag)
    assert found(environ=environ) == ("variable", setting.variable)
    assert found() == ("file", str(path))
    path.unlink()
    assert found()[0] == "default"
    assert str(config.shown(getattr(load(tmp_path, flags=flags), setting.attribute).value)) != ""


def test_every_setting_has_a_field_and_every_field_a_setting():
    fields = set(config.Settings.__dataclass_fields__) - {"file", "warnings"}
    assert fields == {setting.attribute for setting in config.SETTINGS}


def test_an_empty_variable_is_an_absent_one(tmp_path):
    write(tmp_path / "torchrelay.toml", 'url = "/file"\n')
    assert load(tmp_path, environ={"TORCHRELAY_URL": ""}).url.value == "/file"


@pytest.mark.parametrize("name", ["TORCHRELAY_KEY", "TORCHRELAY_POLICY"])
def test_an_empty_variable_that_decides_on_trust_is_refused(tmp_path, name):
    """A secret that is missing in CI turns up as an empty one: that must not sign with another key."""
    with pytest.raises(UsageError, match=f"{name} is set but empty"):
        load(tmp_path, environ={name: ""})


def test_an_empty_flag_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--key is set but empty"):
        load(tmp_path, flags={"key": ""})


def test_nothing_is_guessed_for_store_and_workload(tmp_path):
    settings = load(tmp_path)
    with pytest.raises(UsageError, match="no store is named") as store:
        settings.require_url()
    with pytest.raises(UsageError, match="no workload is named") as workload:
        settings.require_workload()
    assert "TORCHRELAY_URL" in store.value.remedy
    assert "TORCHRELAY_WORKLOAD" in workload.value.remedy


# --- variables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("TORCHRELAY_KEI", "TORCHRELAY_KEY"),
        ("TORCHRELAY_KEYS", "TORCHRELAY_KEY"),
        ("TORCH_RELAY_KEY", "TORCHRELAY_KEY"),
        ("torchrelay_key", "TORCHRELAY_KEY"),
        ("TORCHRELAY_SIGNING_KEY", ""),
        ("TORCHRELAY_SIGN", ""),
        ("TORCHRELAY_POLCY", "TORCHRELAY_POLICY"),
        ("TORCHRELAY_TRUSTED", ""),
        ("TORCHRELAY_KEY_PASSPHRSE", "TORCHRELAY_KEY_PASSPHRASE"),
        ("TORCHRELAY_VERIFY", ""),
    ],
)
def test_a_misspelt_variable_that_may_decide_on_trust_is_an_error(tmp_path, name, near):
    with pytest.raises(UsageError) as error:
        load(tmp_path, environ={name: "x"})
    assert error.value.subject == name
    assert near in error.value.remedy


@pytest.mark.parametrize(
    ("name", "near"), [("TORCHRELAY_URI", "TORCHRELAY_URL"), ("TORCHRELAY_WORKLOADS", "TORCHRELAY_WORKLOAD")]
)
def test_another_misspelt_variable_is_a_warning_with_the_near_match(tmp_path, name, near):
    settings = load(tmp_path, environ={name: "s3://user:geheim@x/y"})
    assert len(settings.warnings) == 1
    assert name in settings.warnings[0]
    assert near in settings.warnings[0]
    assert "geheim" not in settings.warnings[0]


def test_known_variables_and_those_of_others_are_no_mistakes(tmp_path):
    known = {name: "/x" for name in config.OTHER_VARIABLES if name != config.CONFIG_VARIABLE}
    others = {"TORCHINDUCTOR_CACHE_DIR": "/c", "TORCH_LOGS": "1", "RELAY_KEY": "1"}
    assert load(tmp_path, environ={**known, **others}).warnings == ()


def test_the_variables_of_the_pass_phrase_are_known_by_the_names_that_keyfiles_reads():
    assert {keyfiles.PASSPHRASE_VARIABLE, keyfiles.PASSPHRASE_FILE_VARIABLE} < set(config.OTHER_VARIABLES)


# --- files ------------------------------------------------------------------------------------


def test_the_nearest_file_at_or_above_the_directory_counts(tmp_path):
    write(tmp_path / "torchrelay.toml", 'workload = "far"\n')
    near = tmp_path / "a"
    (near / "b").mkdir(parents=True)
    write(near / "pyproject.toml", '[tool.torchrelay]\nworkload = "near"\n')
    write(near / "b" / "pyproject.toml", '[project]\nname = "other"\n')
    settings = load(near / "b")
    assert settings.workload.value == "near"
    assert settings.file == near / "pyproject.toml"


def test_torchrelay_toml_beats_pyproject_toml_beside_it(tmp_path):
    write(tmp_path / "torchrelay.toml", 'workload = "own"\n')
    write(tmp_path / "pyproject.toml", '[tool.torchrelay]\nworkload = "project"\n')
    assert load(tmp_path).workload.value == "own"


def test_a_broken_pyproject_of_another_project_is_not_our_trouble(tmp_path):
    write(tmp_path / "pyproject.toml", "[[[")
    assert load(tmp_path).file is None


def test_paths_in_a_file_are_meant_from_where_it_lies(tmp_path):
    write(
        tmp_path / "torchrelay.toml", 'url = "store"\nkey = "k.pem"\ncache-dir = "~/c"\n[trees]\nvllm = "v"\n'
    )
    (tmp_path / "sub").mkdir()
    settings = load(tmp_path / "sub")
    assert settings.url.value == str(tmp_path / "store")
    assert settings.key.value == tmp_path / "k.pem"
    assert settings.cache_dir.value == Path("~/c").expanduser()
    assert settings.trees.value == {"vllm": tmp_path / "v"}


@pytest.mark.parametrize("url", ["s3://bucket/x", "redis://h/0", "file:///srv", "~/store"])
def test_urls_in_a_file_stay_as_they_are(tmp_path, url):
    write(tmp_path / "torchrelay.toml", f'url = "{url}"\n')
    assert load(tmp_path).url.value == url


@pytest.mark.parametrize(
    ("key", "near"),
    [("kye", "key"), ("cache_dir", "cache-dir"), ("polisy", "policy"), ("xyzzy", "Known are")],
)
@pytest.mark.parametrize("name", ["torchrelay.toml", "pyproject.toml"])
def test_an_unknown_key_is_refused_with_file_key_and_near_match(tmp_path, name, key, near):
    table = "[tool.torchrelay]\n" if name == "pyproject.toml" else ""
    path = write(tmp_path / name, f'{table}{key} = "x"\n')
    with pytest.raises(UsageError) as error:
        load(tmp_path)
    assert str(path) in error.value.message
    assert repr(key) in error.value.message
    assert near in error.value.remedy


@pytest.mark.parametrize(
    "text",
    [
        "url = 3",
        "url = ['a']",
        "url = ''",
        'url = "a\\u0000b"',
        "deadline = true",
        "deadline = 'soon'",
        "deadline = 0",
        "deadline = -1",
        "deadline = inf",
        "deadline = nan",
        "trees = 3",
        "trees = ['vllm']",
        "trees = [3]",
        "trees = {a = 1}",
        "trees = ['a=/x', 'a=/y']",
        "key = 1979-05-27",
        "not toml",
        "url = '\\ud800'\n'",
        "a = " + "[" * 20_000,
    ],
)
def test_a_value_or_file_that_cannot_be_meant_is_refused(tmp_path, text):
    write(tmp_path / "torchrelay.toml", text + "\n")
    with pytest.raises(UsageError) as error:
        load(tmp_path)
    assert error.value.remedy


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"x" * (2**20 + 1)])
def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path, data):
    (tmp_path / "torchrelay.toml").write_bytes(data)
    with pytest.raises(UsageError):
        load(tmp_path)


def test_a_table_that_is_none_is_refused(tmp_path):
    write(tmp_path / "pyproject.toml", "[tool]\ntorchrelay = 3\n")
    with pytest.raises(UsageError, match="is not a table"):
        load(tmp_path)


def test_a_file_that_all_can_write_is_used_only_if_it_is_named(tmp_path):
    """Else whoever can write to a directory above could say whom to trust."""
    path = write(tmp_path / "torchrelay.toml", 'policy = "/evil"\n')
    path.chmod(0o666)
    with pytest.raises(UnsafeDirectoryError, match="writable by all"):
        load(tmp_path)
    assert load(tmp_path, config=path).policy.value == Path("/evil")
    assert load(tmp_path, environ={"TORCHRELAY_CONFIG": str(path)}).policy.source == str(path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_used_only_if_it_is_named(tmp_path):
    path = write(tmp_path / "torchrelay.toml", 'policy = "/evil"\n')
    os.chown(path, 4242, 4242)
    with pytest.raises(UnsafeDirectoryError, match="belongs to another user"):
        load(tmp_path)
    assert load(tmp_path, config=path).policy.value == Path("/evil")


@pytest.mark.parametrize("how", ["missing", "directory", "no table"])
def test_a_named_file_must_be_one(tmp_path, how):
    path = tmp_path / "pyproject.toml"
    if how == "directory":
        path.mkdir()
    if how == "no table":
        write(path, "[project]\n")
    with pytest.raises(UsageError) as error:
        load(tmp_path, config=path)
    assert error.value.subject == str(path)


def test_a_key_given_in_place_of_its_file_is_refused_and_not_shown(tmp_path):
    text = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIGeheim\n-----END PRIVATE KEY-----\n"
    with pytest.raises(KeyFileError) as error:
        load(tmp_path, environ={"TORCHRELAY_KEY": text})
    assert "Geheim" not in error.value.diagnostics()


# --- directories ------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["ann", "DOMAIN\\ann", 'a/b:c*d?e"f<g>h|i', "ünï"])
def test_the_default_is_the_directory_that_torch_takes(tmp_path, monkeypatch, user):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, user)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    # What torch._inductor.runtime.cache_dir_utils does, to the letter.
    import tempfile

    torchs = f"{tempfile.gettempdir()}/" + "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    assert str(config.load(directory=tmp_path).cache_dir.value) == torchs


@pytest.mark.torch
def test_the_default_is_what_the_installed_torch_says(tmp_path, monkeypatch):
    utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(config.load(directory=tmp_path).cache_dir.value) == utils.default_cache_dir()


@pytest.mark.skipif(os.name != "posix", reason="user ids")
def test_a_user_without_a_name_gets_the_directory_that_torch_takes(monkeypatch):
    import pwd

    def nobody(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert config.default_cache_dir({}).name == f"torchinductor_uid_{os.getuid()}"


def test_pytorchs_own_variables_stand_below_the_file(tmp_path):
    environ = {"TORCHINDUCTOR_CACHE_DIR": "/i", "TRITON_CACHE_DIR": "t"}
    settings = load(tmp_path, environ=environ)
    assert settings.cache_dir.value == Path("/i")
    assert settings.cache_dir.source == "TORCHINDUCTOR_CACHE_DIR"
    assert settings.triton_cache_dir.value == tmp_path / "t"
    write(tmp_path / "torchrelay.toml", 'cache-dir = "/f"\n')
    assert load(tmp_path, environ=environ).cache_dir.value == Path("/f")


def test_an_empty_variable_of_pytorch_is_refused(tmp_path):
    """PyTorch would take the current directory for its cache."""
    with pytest.raises(UsageError, match="TORCHINDUCTOR_CACHE_DIR is set but empty"):
        load(tmp_path, environ={"TORCHINDUCTOR_CACHE_DIR": ""})


def test_trees_come_as_flags_or_as_a_path_list(tmp_path):
    assert load(tmp_path, flags={"trees": ["a=/x", "b=y=z"]}).trees.value == {
        "a": Path("/x"),
        "b": tmp_path / "y=z",
    }
    joined = os.pathsep.join(["a=/x", "b=/y"])
    assert load(tmp_path, environ={"TORCHRELAY_TREES": joined}).trees.value == {
        "a": Path("/x"),
        "b": Path("/y"),
    }


# --- secrets ----------------------------------------------------------------------------------


def test_shown_values_hold_no_credentials():
    shown = str(config.shown("redis://ann:geheim@h/0?token=verysecret"))
    assert shown.startswith("redis://ann:***@h/0?")
    assert "geheim" not in shown
    assert "verysecret" not in shown
    assert "heim" not in str(config.shown("redis://ann:ge#heim@h:x/y"))
    assert config.shown("/srv/relay") == "/srv/relay"


@given(st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=4, max_size=20))
def test_the_password_of_a_url_is_among_its_secrets_in_both_spellings(password):
    from urllib.parse import quote

    quoted = quote(password, safe="")
    found = config.secrets_of(f"redis://ann:{quoted}@host/0?token={quoted}")
    assert {password, quoted} <= set(found)


@pytest.mark.parametrize("url", [None, "", "/srv/x", "s3://bucket/x", "http://[bad"])
def test_urls_without_credentials_have_no_secrets_that_would_blot_out_text(url):
    assert config.secrets_of(url) in {(), (url,)}


def test_close_names_are_found_and_far_ones_are_not():
    assert config.closest("--wrkload", ["--workload", "--key"]) == "--workload"
    assert config.closest("--zzz", ["--workload", "--key"]) == ""
