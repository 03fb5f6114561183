# SPDX-License-Identifier: Apache-2.0
"""Settings, each with where it came from: flag > variable > file > default.

``docs/reference/configuration.md`` lists them. Nothing that is misspelt is passed over: an unknown
key of a file is an error, an unknown ``TORCHRELAY_*`` variable is a warning, and an error where it
may have been meant to say which key signs or whom to trust.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from torchrelay import configfile
from torchrelay.configfile import FILE_NAME
from torchrelay.errors import KeyFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "TORCHRELAY_"
SHORTEST_SECRET = 4
"""Characters; what is shorter is no secret, and to conceal it would blot out ordinary text."""
CONFIG_VARIABLE = "TORCHRELAY_CONFIG"
DEBUG_VARIABLE = "TORCHRELAY_DEBUG"
OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    DEBUG_VARIABLE,
    "TORCHRELAY_KEY_PASSPHRASE",
    "TORCHRELAY_KEY_PASSPHRASE_FILE",
)
"""Variables that are no settings: they have no flag and no place in a file."""

Layer = Literal["flag", "variable", "file", "default"]
T = TypeVar("T")

_LOOKS_LIKE_OURS = re.compile(r"torch_?relay_", re.IGNORECASE)
_IS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_DECIDES_TRUST = re.compile(r"KEY|SIGN|TRUST|POLIC|VERIF|SECUR", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Value(Generic[T]):
    """One setting's value, and the layer and the very flag, variable or file that it is from."""

    value: T
    layer: Layer
    source: str


@dataclass(frozen=True, slots=True)
class _Raw:
    """A value as it was written: a string, or what TOML made of it; ``base`` is for relative paths."""

    value: Any
    layer: Layer
    source: str
    base: Path


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name in files, how to read it, what it is, and what holds where it is not set."""

    name: str
    parse: Callable[[_Raw], Any]
    title: str
    otherwise: str = ""
    decides_trust: bool = False

    @property
    def attribute(self) -> str:
        """The name of its field in :class:`Settings`."""
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        """How it is given on a command line."""
        return {"url": "URL", "trees": "--tree"}.get(self.name, f"--{self.name}")

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.attribute.upper()


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, with its origin.

    Attributes:
        url: Where the store is. May hold a password; :func:`shown` redacts it.
        workload: The name that entries are published under.
        cache_dir: The directory of PyTorch's compile caches.
        triton_cache_dir: Triton's own; None: below ``cache_dir``, where Inductor puts it.
        trees: Declared roots of frameworks that keep their own caches.
        key: The file of the signing key; None: this user's own.
        policy: The file that says whom to trust; None: this user's own.
        state_dir: Where it is remembered what a store held; None: the user's state directory.
        deadline: Seconds that a pull may take; None: no bound.
        file: The configuration file that was read, if one was.
        warnings: What looks like a mistake but decides nothing about trust.
    """

    url: Value[str | None]
    workload: Value[str | None]
    cache_dir: Value[Path]
    triton_cache_dir: Value[Path | None]
    trees: Value[Mapping[str, Path]]
    key: Value[Path | None]
    policy: Value[Path | None]
    state_dir: Value[Path | None]
    deadline: Value[float | None]
    file: Path | None = None
    warnings: tuple[str, ...] = field(default=())

    def items(self) -> Iterator[tuple[Setting, Value[Any]]]:
        """Each setting with its value, in the order of :data:`SETTINGS`."""
        return ((setting, getattr(self, setting.attribute)) for setting in SETTINGS)

    def require_url(self) -> str:
        """The store's URL.

        Raises:
            UsageError: None is configured.
        """
        if self.url.value is None:
            raise UsageError(
                "no store is named",
                remedy=f"Give its URL or path as an argument, in TORCHRELAY_URL, or as `url` in {FILE_NAME}.",
                subject="url",
            )
        return self.url.value

    def require_workload(self) -> str:
        """The workload's name; never guessed, since it decides what other machines will load.

        Raises:
            UsageError: None is configured.
        """
        if self.workload.value is None:
            raise UsageError(
                "no workload is named",
                remedy="Name one, such as -w acme/llama-8b/prod, in TORCHRELAY_WORKLOAD, or as `workload` "
                f"in {FILE_NAME}.",
                subject="workload",
            )
        return self.workload.value


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    config: str | Path | None = None,
) -> Settings:
    """Bring the layers together.

    Args:
        flags: Values from the command line by setting name; None where a flag was not given.
        environ: The environment; by default this process's.
        directory: Where the search for a file begins; by default the current directory.
        config: A file to read instead of searching for one.

    Raises:
        UsageError: A value or file cannot be read, or a name in a file is unknown.
    """
    variables = os.environ if environ is None else environ
    here = Path.cwd() if directory is None else directory
    warnings = check_variables(variables)
    path, table = _configuration(here, config, variables)
    layers = _Layers(flags or {}, variables, here, path, table)
    values = {setting.attribute: _resolve(setting, layers) for setting in SETTINGS}
    return Settings(**values, file=path, warnings=tuple(warnings))


def shown(value: Any) -> str | float | dict[str, str] | None:
    """A value as it may be printed: credentials in URLs are ``***``."""
    if isinstance(value, Mapping):
        return {name: str(path) for name, path in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return _redacted(value)
    return cast("float | None", value)


def secrets_of(url: str | None) -> tuple[str, ...]:
    """The parts of a URL that must not be shown, in each spelling in which they may turn up."""
    from urllib.parse import parse_qsl, unquote, urlsplit  # noqa: PLC0415 - most commands need no URL

    if not url or "://" not in url:
        return ()
    try:
        parts = urlsplit(url)
    except ValueError:
        return (url,)
    user = parts.netloc.rpartition("@")[0]
    found = {user.partition(":")[2] or user, *(value for _, value in parse_qsl(parts.query))}
    spellings = found | {unquote(text) for text in found}
    return tuple(sorted((text for text in spellings if len(text) >= SHORTEST_SECRET), key=len, reverse=True))


def check_variables(environ: Mapping[str, str]) -> list[str]:
    """Warnings for variables that look like torchrelay's and are not.

    Raises:
        UsageError: One may have been meant to name a key or a policy: to pass over it could sign
            with another key, or trust others, than the user thinks.
    """
    known = [*(setting.variable for setting in SETTINGS), *OTHER_VARIABLES]
    warnings = []
    for name in sorted(environ):
        if _LOOKS_LIKE_OURS.match(name) is None or name in known:
            continue
        near = closest(name.upper(), known)
        hint = f"did you mean {near}?" if near else f"known are: {', '.join(known)}."
        if _DECIDES_TRUST.search(name) or near in _TRUST_VARIABLES:
            raise UsageError(
                f"the environment variable {name} is unknown, and may have been meant to decide on trust",
                remedy=f"Correct or unset it; {hint}",
                subject=name,
            )
        warnings.append(f"the environment variable {name} is unknown and does nothing; {hint}")
    return warnings


def closest(name: str, known: Sequence[str]) -> str:
    """The known name that ``name`` was probably meant to be, or an empty string."""
    import difflib  # noqa: PLC0415 - only mistakes need it

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), "")


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """The directory that PyTorch takes if nothing names one, without importing torch.

    As ``torch._inductor.runtime.cache_dir_utils.default_cache_dir``, sanitising included.
    """
    import tempfile  # noqa: PLC0415 - not needed where a directory is named

    user = re.sub(r'[\\/:*?"<>|]', "_", _user_name(environ))
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _user_name(environ: Mapping[str, str]) -> str:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        if environ.get(name):
            return environ[name]
    getuid = getattr(os, "getuid", None)
    if getuid is None:
        return "unknown_user"
    try:
        import pwd  # noqa: PLC0415 - not on Windows

        return pwd.getpwuid(getuid()).pw_name
    except (KeyError, ImportError, OSError):
        return f"uid_{getuid()}"


# --- one value --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layers:
    flags: Mapping[str, Any]
    environ: Mapping[str, str]
    here: Path
    file: Path | None
    table: Mapping[str, Any]


def _resolve(setting: Setting, layers: _Layers) -> Value[Any]:
    raw = _first(setting, layers)
    if raw is None:
        return _default(setting, layers.environ, layers.here)
    return Value(setting.parse(raw), raw.layer, raw.source)


def _first(setting: Setting, layers: _Layers) -> _Raw | None:
    given = layers.flags.get(setting.attribute)
    if given is not None:
        return _Raw(given, "flag", setting.flag, layers.here)
    value = layers.environ.get(setting.variable)
    # An empty variable is an absent one, except where that would silently sign with another key.
    if value or (value is not None and setting.decides_trust):
        return _Raw(value, "variable", setting.variable, layers.here)
    if layers.file is not None and setting.name in layers.table:
        return _Raw(layers.table[setting.name], "file", str(layers.file), layers.file.parent)
    return None


def _default(setting: Setting, environ: Mapping[str, str], here: Path) -> Value[Any]:
    if setting.name == "trees":
        return Value({}, "default", "")
    variable = _PYTORCHS_OWN.get(setting.name)
    if variable is not None and variable in environ:
        # As PyTorch reads it: no ~, relative to the current directory.
        return Value(here / _not_empty(environ[variable], variable), "default", variable)
    if setting.name == "cache-dir":
        return Value(default_cache_dir(environ), "default", setting.otherwise)
    return Value(None, "default", setting.otherwise)


def _not_empty(text: str, source: str) -> str:
    if not text.strip():
        raise UsageError(
            f"{source} is set but empty",
            remedy="Give it a value, or leave it out altogether.",
            subject=source,
        )
    return text


def _string(raw: _Raw) -> str:
    if not isinstance(raw.value, str):
        raise _wrong(raw, "a string")
    if "\0" in raw.value:
        raise _wrong(raw, "a string without NUL")
    return _not_empty(raw.value, raw.source)


def _url(raw: _Raw) -> str:
    text = _string(raw)
    # A path in a file is meant from where the file lies, wherever the command is run.
    if raw.layer != "file" or _IS_URL.match(text) or text.startswith("~"):
        return text
    return str(raw.base / text)


def _path(raw: _Raw) -> Path:
    text = _string(raw)
    if "\n" in text or "PRIVATE KEY" in text:
        raise KeyFileError(
            f"{raw.source} holds a key or text of several lines where a file's name belongs",
            remedy="Write the key to a file that only you can read, and name that file.",
            subject=raw.source,
        )
    try:
        path = Path(text).expanduser()
    except RuntimeError as exc:
        raise UsageError(f"the home directory in {text!r} cannot be found", subject=raw.source) from exc
    return Path(os.path.normpath(raw.base / path))


def _trees(raw: _Raw) -> dict[str, Path]:
    pairs: Sequence[tuple[Any, Any]]
    if isinstance(raw.value, Mapping):
        pairs = list(raw.value.items())
    else:
        texts = raw.value.split(os.pathsep) if isinstance(raw.value, str) else raw.value
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise _wrong(raw, "NAME=PATH, or a table of names and paths")
        pairs = [_pair(raw, text) for text in texts if text]
    trees: dict[str, Path] = {}
    for name, path in pairs:
        if name in trees:
            raise UsageError(f"{raw.source} declares the tree {name!r} twice", subject=name)
        trees[name] = _path(_Raw(path, raw.layer, f"{raw.source} ({name})", raw.base))
    return trees


def _pair(raw: _Raw, text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(
            f"{text!r} of {raw.source} is not NAME=PATH",
            remedy="Write for example vllm=~/.cache/vllm/torch_compile_cache.",
            subject=raw.source,
        )
    return name, path


def _seconds(raw: _Raw) -> float:
    if isinstance(raw.value, bool) or not isinstance(raw.value, (str, int, float)):
        raise _wrong(raw, "a number of seconds")
    try:
        seconds = float(raw.value)
    except (ValueError, OverflowError):
        raise _wrong(raw, "a number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise _wrong(raw, "a number of seconds above 0")
    return seconds


def _wrong(raw: _Raw, wanted: str) -> UsageError:
    return UsageError(f"{raw.source} has a value that is not {wanted}", subject=raw.source)


def _redacted(text: str) -> str:
    from torchrelay.storage.location import Location, redact_text  # noqa: PLC0415 - not for --help

    if "://" not in text:
        return text
    try:
        return Location.parse(text).redacted
    except UsageError:
        return redact_text(text)


SETTINGS: tuple[Setting, ...] = (
    Setting("url", _url, "where the store is: a URL or a path"),
    Setting("workload", _string, "name that entries are published under"),
    Setting("cache-dir", _path, "directory of PyTorch's compile caches", "PyTorch's default"),
    Setting(
        "triton-cache-dir",
        _path,
        "directory of Triton's cache, if it has one of its own",
        "below the cache directory",
    ),
    Setting("trees", _trees, "roots of frameworks that keep their own caches"),
    Setting("key", _path, "file of the key that signs", "this user's own", decides_trust=True),
    Setting("policy", _path, "file that says whom to trust", "this user's own", decides_trust=True),
    Setting("state-dir", _path, "where it is remembered what a store held", "this user's own"),
    Setting("deadline", _seconds, "seconds that a pull may take", "no bound"),
)
"""Every setting there is."""

_TRUST_VARIABLES = frozenset(
    [*(setting.variable for setting in SETTINGS if setting.decides_trust), *OTHER_VARIABLES[2:]]
)
_PYTORCHS_OWN = {"cache-dir": "TORCHINDUCTOR_CACHE_DIR", "triton-cache-dir": "TRITON_CACHE_DIR"}


def _configuration(
    here: Path, flag: str | Path | None, environ: Mapping[str, str]
) -> tuple[Path | None, Mapping[str, Any]]:
    raw = None
    if flag is not None:
        raw = _Raw(str(flag), "flag", "--config", here)
    elif environ.get(CONFIG_VARIABLE):
        raw = _Raw(environ[CONFIG_VARIABLE], "variable", CONFIG_VARIABLE, here)
    if raw is not None:
        path = _path(raw)
        return path, _known_only(path, configfile.read(path))
    found = configfile.find(here)
    return (None, {}) if found is None else (found[0], _known_only(*found))


def _known_only(path: Path, table: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [setting.name for setting in SETTINGS]
    for name in table:
        if name not in known:
            near = closest(name.replace("_", "-"), known)
            raise UsageError(
                f"{path} has the unknown key {name!r}",
                remedy=f"Did you mean {near!r}?" if near else f"Known are: {', '.join(known)}.",
                subject=f"{path}: {name}",
            )
    return table
