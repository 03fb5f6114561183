# SPDX-License-Identifier: Apache-2.0
"""Where a store is: a URL or a path, parsed once, and never printed with a secret in it."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from torchrelay.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LONE_COLON = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_DEFAULT_PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379, "sftp": 22}

# For these the user's name is an address and decides which folder is meant; elsewhere a lone name
# before the @ may well be a token.
_USER_IS_ADDRESS = {"sftp", "ssh"}

# Query values that are printed. All others may be a secret of a service that we do not know.
_HARMLESS = {
    "anon",
    "chunk_size",
    "client",
    "connect_timeout",
    "db",
    "endpoint",
    "endpoint_url",
    "path_style",
    "prefix",
    "profile",
    "project",
    "protocol",
    "region",
    "requester_pays",
    "timeout",
    "ttl",
}
# Query values that say which store is meant, as opposed to how it is reached.
_IDENTITY = {"db", "endpoint", "endpoint_url", "prefix"}

# In free text every doubt is decided for masking: up to the last @, and the whole of a URL's query.
_USERINFO_IN_TEXT = re.compile(r"(://)[^\s'\"<>]*@")
_QUERY_OF_URL_IN_TEXT = re.compile(r"(://[^\s'\"<>?]*\?)[^\s'\"<>]+")
_QUERY_IN_TEXT = re.compile(r"([?&][A-Za-z0-9_.%~-]+=)[^&\s'\"<>]+")
_MASK = "***"


def redact_text(text: str) -> str:
    """``text`` without user information and query values of the URLs in it."""
    text = _USERINFO_IN_TEXT.sub(rf"\1{_MASK}@", text)
    text = _QUERY_OF_URL_IN_TEXT.sub(rf"\1{_MASK}", text)
    return _QUERY_IN_TEXT.sub(rf"\1{_MASK}", text)


@dataclass(frozen=True, slots=True)
class Location:
    """A store's place. ``str()`` and ``repr()`` are redacted.

    Laws: ``parse(l.url) == l``; ``l.normalised`` holds no credentials and is equal for all
    spellings of one place; ``Location.parse(l.normalised).normalised == l.normalised``.

    Args:
        scheme: Lower-case scheme; ``file`` for plain paths.
        url: The whole URL, secrets included. Never print it.
    """

    scheme: str
    url: str = field(repr=False)

    @classmethod
    def parse(cls, text: str | Path) -> Location:
        """Read a URL, a path, or a path that begins with ``~``.

        Raises:
            UsageError: It cannot be meant. The text is not repeated, since it may hold a password.
        """
        if isinstance(text, Path):
            return cls._of_path(str(text))
        if not text.strip():
            raise UsageError(
                "the store's URL is empty", remedy="Name a store, such as /srv/relay or s3://bucket/relay."
            )
        if any(ord(c) < 32 or ord(c) == 127 for c in text):
            raise UsageError("the store's URL holds a control character")
        match = _SCHEME.match(text)
        if match is not None:
            return cls._of_url(match[1].lower(), text)
        if text.lower().startswith("file:/"):
            return cls._of_url("file", "file://" + text[len("file:") :])
        lone = _LONE_COLON.match(text)
        if lone is not None and "/" not in lone[0]:
            raise UsageError(
                f"{lone[0]!r} begins neither a URL nor a path",
                remedy=f"Write {lone[0]}//… for a URL, or ./… for a path with a colon.",
            )
        return cls._of_path(text)

    @classmethod
    def _of_path(cls, text: str) -> Location:
        try:
            path = Path(text).expanduser()
        except RuntimeError as exc:
            raise UsageError(f"the home directory in {text!r} cannot be found", subject=text) from exc
        absolute = posixpath.normpath(str(path if path.is_absolute() else Path.cwd() / path))
        return cls("file", "file://" + quote("/" + absolute.lstrip("/"), errors="surrogateescape"))

    @classmethod
    def _of_url(cls, scheme: str, text: str) -> Location:
        rest = text[text.index("://") + 3 :]
        if scheme == "file":
            return cls._of_file_url(rest)
        try:
            parts = urlsplit(f"{scheme}://{rest}")
            port = parts.port
        except ValueError:
            raise _malformed(scheme) from None
        # An unescaped / ? # or @ in a password ends the authority early; the remainder would be shown.
        authority = parts.netloc
        suspicious = "@" in authority or port is not None or authority.endswith(":")
        if parts.fragment or (suspicious and ("@" in parts.path + parts.query or not parts.hostname)):
            raise _malformed(scheme)
        return cls(scheme, f"{scheme}://{rest}")

    @classmethod
    def _of_file_url(cls, rest: str) -> Location:
        if "?" in rest or "#" in rest:
            raise UsageError(
                "a file:// URL has neither query nor fragment", remedy="Write %3F for ? and %23 for #."
            )
        host, slash, path = rest.partition("/")
        if host == "~":
            return cls._of_path("~" + slash + unquote(path, errors="surrogateescape"))
        if host not in {"", "localhost"} or not slash:
            raise UsageError(
                f"file:// URLs name a path on this machine, not the host {host!r}",
                remedy="Write three slashes, as in file:///srv/relay.",
            )
        plain = unquote(path, errors="surrogateescape")
        if "\0" in plain:
            raise UsageError("the store's URL holds a NUL")
        return cls._of_path("/" + plain)

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def path(self) -> str:
        """The path; for ``file`` absolute and without escapes."""
        if self.scheme == "file":
            return unquote(self.url[len("file://") :], errors="surrogateescape")
        return self._parts.path

    @property
    def host(self) -> str:
        """The host or bucket; may be empty."""
        return self._parts.hostname or ""

    @property
    def port(self) -> int | None:
        """The port, if one is stated."""
        return self._parts.port

    @property
    def query(self) -> dict[str, str]:
        """The query's values by name, secrets included."""
        return dict(parse_qsl(self._parts.query, keep_blank_values=True))

    @property
    def redacted(self) -> str:
        """The URL as it may be printed: passwords, tokens and unknown query values are ``***``."""
        if self.scheme == "file":
            return self.path if self.path.isprintable() else self.url
        parts = self._parts
        authority = self._redacted_user(parts) + parts.netloc.rpartition("@")[2]
        return f"{self.scheme}://{authority}{redact_text(parts.path)}{self._redacted_query()}"

    def _redacted_user(self, parts: SplitResult) -> str:
        user, at, _ = parts.netloc.rpartition("@")
        if not at:
            return ""
        name, colon, _ = user.partition(":")
        if colon:
            return f"{name}:{_MASK}@"
        return f"{name if self.scheme in _USER_IS_ADDRESS else _MASK}@"

    def _redacted_query(self) -> str:
        pairs = parse_qsl(self._parts.query, keep_blank_values=True)
        shown = [f"{name}={redact_text(value)}" for name, value in pairs if name.lower() in _HARMLESS]
        # Of the others not even the names: where a password holds a ?, its remainder would be one.
        if len(shown) < len(pairs) or (self._parts.query and not pairs):
            shown.append(_MASK)
        return "?" + "&".join(shown) if shown else ""

    @property
    def normalised(self) -> str:
        """One spelling for one place, without credentials; for store identities."""
        if self.scheme == "file":
            return self.url
        parts = self._parts
        host = parts.netloc.rpartition("@")[2].lower()
        default = _DEFAULT_PORTS.get(self.scheme)
        if default is not None:
            host = host.removesuffix(f":{default}")
        user = parts.username if self.scheme in _USER_IS_ADDRESS else None
        path = "/".join(c for c in parts.path.split("/") if c not in {"", "."})
        query = "&".join(
            sorted(f"{k}={redact_text(v).rstrip('/')}" for k, v in self.query.items() if k in _IDENTITY)
        )
        return (
            f"{self.scheme}://{user + '@' if user else ''}{host}{'/' + path if path else ''}"
            f"{'?' + query if query else ''}"
        )

    def __str__(self) -> str:
        return self.redacted

    def __repr__(self) -> str:
        return f"Location({self.redacted!r})"


def _malformed(scheme: str) -> UsageError:
    return UsageError(
        f"the {scheme}:// URL of the store is malformed",
        remedy="Percent-encode special characters of user name and password: / is %2F, # is %23, @ is %40.",
    )
