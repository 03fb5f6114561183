# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.storage import Location, redact_text

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/srv/relay", "/srv/relay"),
        ("/srv//relay/", "/srv/relay"),
        ("/srv/./x/../relay", "/srv/relay"),
        ("//srv/relay", "/srv/relay"),
        ("file:///srv/relay", "/srv/relay"),
        ("FILE:///srv/relay/", "/srv/relay"),
        ("file://localhost/srv/relay", "/srv/relay"),
        ("file:/srv/relay", "/srv/relay"),
        ("file:///srv/a%20b%3F", "/srv/a b?"),
        ("/srv/a b?#%41", "/srv/a b?#%41"),
        ("/srv/ä", "/srv/ä"),
        ("~/relay", "/home/me/relay"),
        ("file://~/relay", "/home/me/relay"),
        ("relay", "/work/here/relay"),
        ("./a:b", "/work/here/a:b"),
        ("a/b:c", "/work/here/a/b:c"),
        ("../relay", "/work/relay"),
    ],
)
def test_paths(monkeypatch, text, path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(Path, "cwd", lambda: Path("/work/here"))
    location = Location.parse(text)
    assert location.scheme == "file"
    assert location.path == path
    assert location.redacted == str(location) == path
    assert location.normalised.startswith("file:///")
    assert Location.parse(location.url) == location
    assert Location.parse(path) == location
    assert Location.parse(Path(path)) == location


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "file://host/srv",
        "file://srv",
        "file:///srv?x=1",
        "file:///srv#x",
        "file:///a%00b",
        "/srv/a\0b",
        "s3://bucket/a\nb",
        "s3:bucket",
        "memory:x",
        "~nosuchuserhere/x",
        f"redis://:pass/{SECRET}@host",
        f"redis://:12/{SECRET}@host",
        f"redis://:12#{SECRET}@host",
        f"redis://user:p#{SECRET}@host/0",
        f"https://host:{SECRET}/x",
        f"https://[::1/{SECRET}",
    ],
)
def test_what_cannot_be_meant_is_refused_without_repeating_a_secret(text):
    with pytest.raises(UsageError) as caught:
        Location.parse(text)
    assert SECRET not in caught.value.diagnostics() + repr(caught.value) + caught.value.subject
    assert caught.value.remedy
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{SECRET}@host:6379/0", "redis://:***@host:6379/0"),
        (f"redis://me:{SECRET}@host/0", "redis://me:***@host/0"),
        (f"redis://me:a@{SECRET}@host/0", "redis://me:***@host/0"),
        (f"https://{SECRET}@host/x", "https://***@host/x"),
        ("sftp://me@host/x", "sftp://me@host/x"),
        (f"sftp://me:{SECRET}@host/x", "sftp://me:***@host/x"),
        (
            f"s3://b/p?endpoint=http://h:9&X-Amz-Signature={SECRET}",
            "s3://b/p?endpoint=http://h:9&***",
        ),
        (f"s3://b/p?endpoint=http://u:{SECRET}@h:9", "s3://b/p?endpoint=http://***@h:9"),
        (f"https://h/x?sv=1&sig={SECRET}", "https://h/x?***"),
        (f"https://h/x?{SECRET}", "https://h/x?***"),
        (f"s3://b/p?region=eu&KEY={SECRET}&Secret={SECRET}", "s3://b/p?region=eu&***"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_secrets_are_never_shown(url, shown):
    location = Location.parse(url)
    for text in (str(location), repr(location), location.redacted, location.normalised, f"{location}"):
        assert SECRET not in text
    assert location.redacted == shown
    assert location.url.endswith(url.partition("://")[2])
    assert pickle.loads(pickle.dumps(location)) == location


@pytest.mark.parametrize(
    "spellings",
    [
        [
            "s3://bucket/p",
            "S3://bucket/p/",
            "s3://bucket//p",
            "s3://key:secret@bucket/p",
            "s3://bucket/p?region=x",
        ],
        ["redis://host/0", "redis://:pw@host:6379/0", "redis://HOST/0/"],
        ["s3://b/p?endpoint_url=http://h:9/", "s3://b/p?endpoint_url=http://h:9&profile=x&token=y"],
        ["/srv/x", "file:///srv/x/", "file://localhost/srv//x"],
    ],
)
def test_one_place_has_one_normalised_spelling(spellings):
    (normalised,) = {Location.parse(text).normalised for text in spellings}
    assert Location.parse(normalised).normalised == normalised


def test_different_places_stay_different():
    places = [
        "s3://b/p",
        "s3://b/P",
        "s3://b/p?endpoint=http://one",
        "s3://b/p?endpoint=http://two",
        "s3://c/p",
        "redis://h/0",
        "redis://h/1",
        "redis://h:6380/0",
        "rediss://h/0",
        "sftp://a@h/x",
        "sftp://b@h/x",
        "/srv/p",
        "/srv/P",
        "/srv/p%20",
        "/srv/p ",
    ]
    assert len({Location.parse(place).normalised for place in places}) == len(places)


def test_a_path_that_is_not_utf8(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    location = Location.parse(path)
    assert location.path == path
    assert Location.parse(location.url) == location
    str(location).encode()


def test_parts():
    location = Location.parse("redis://me:p%40w@Host:1234/2?ttl=5")
    assert (location.host, location.port, location.path, location.query) == ("host", 1234, "/2", {"ttl": "5"})


@given(st.text(max_size=40).filter(lambda t: t.strip()))
def test_parse_gives_a_location_or_a_usage_error(text):
    try:
        location = Location.parse(text)
    except UsageError:
        return
    assert Location.parse(location.url) == location
    assert Location.parse(location.normalised).normalised == location.normalised
    str(location), location.path, location.query, location.host, location.port


@given(st.text("abc:/?#@&=%1 ", max_size=30))
def test_a_password_never_shows_wherever_it_breaks(noise):
    """Whatever surrounds a password in a URL, it is masked or the URL is refused."""
    url = f"redis://u:{noise}{SECRET}{noise}@host/0"
    try:
        location = Location.parse(url)
        shown = location.redacted + repr(location) + location.normalised
    except UsageError as exc:
        shown = exc.diagnostics() + repr(exc)
    assert SECRET not in shown


def test_redact_text():
    text = f"Cannot connect to redis://me:{SECRET}@h:1/0, https://h/x?a=1&X-Sig={SECRET} 'http://{SECRET}@h'"
    shown = "Cannot connect to redis://***@h:1/0, https://h/x?*** 'http://***@h'"
    assert redact_text(text) == shown
    assert redact_text(f"PUT /b/k?X-Sig={SECRET}&a=b failed") == "PUT /b/k?X-Sig=***&a=*** failed"
    assert SECRET not in redact_text(f"redis://:12/{SECRET}@host is down")
    assert redact_text("nothing here, a@b.c") == "nothing here, a@b.c"
