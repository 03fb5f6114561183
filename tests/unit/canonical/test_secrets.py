# SPDX-License-Identifier: Apache-2.0
"""Tests of ``torchrelay.canonical.secrets``: a table of what is and what is not a secret.

The secrets are put together here, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

import time

import pytest

from torchrelay.canonical import secrets
from torchrelay.canonical.secrets import PATTERNS, first_secret, kinds_in

LETTERS = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAbCdEfGh"

SECRETS = {
    "redis": ("url-password", "redis://:hunter2@cache:6379/0"),
    "redis with user": ("url-password", "os.environ['TORCH_FOO'] = 'redis://u:s3cret@h:6379/0'"),
    "https": ("url-password", "https://user:p%40ss@example.org/x"),
    "postgres on IPv6": ("url-password", "postgresql+psycopg://u:pw@[::1]/db"),
    "private key": ("private-key", "-----BEGIN " + "PRIVATE KEY-----"),
    "rsa key": ("private-key", "x\\n-----BEGIN RSA " + "PRIVATE KEY-----\\nMII"),
    "openssh key": ("private-key", "-----BEGIN OPENSSH " + "PRIVATE KEY-----"),
    "aws id": ("aws-access-key", "key AKIA" + "IOSFODNN7EXAMPLE."),
    "aws temporary id": ("aws-access-key", "ASIA" + "IOSFODNN7EXAMPLE"),
    "aws secret": ("aws-secret-key", "aws_secret_access_key = " + LETTERS + "/"),
    "github": ("github-token", "ghp_" + LETTERS[:36]),
    "github fine-grained": ("github-token", "github_pat_" + LETTERS),
    "gitlab": ("gitlab-token", "glpat-" + LETTERS[:20]),
    "hugging face": ("huggingface-token", "token hf_" + LETTERS[:34]),
    "slack": ("slack-token", "xoxb-" + "123456789012-abcdef"),
    "google": ("google-api-key", "AIza" + LETTERS[:35]),
    "openai": ("openai-key", "sk-proj-" + LETTERS),
    "jwt": ("jwt", "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0.x"),
    "bearer": ("bearer", "Authorization: " + "Bearer " + LETTERS),
    "password in code": ("assignment", "connect(password='hunter2')"),
    "password in json": ("assignment", '{"db_password": "correct-horse"}'),
    "token in a dump": ("assignment", "os.environ['TRITON_TOKEN'] = 'abc12345'"),
    "secret in a dump": ("assignment", "os.environ['TORCH_CLIENT_SECRET'] = '" + LETTERS + "'"),
    "dump": ("environment-dump", "os.environ['TORCH_MYAUTH'] = 'correct-horse-battery'"),
    "dump with double quotes": ("environment-dump", 'os.environ["TRITON_SITE"]="x"'),
    "dump in a quoted text": ("environment-dump", r"import os\\nos.environ[\\'TORCH-X.Y\\'] = \\'0\\'"),
    "query": ("assignment", "https://host/path?x=1&access_token=" + LETTERS[:12]),
    "environment line": ("assignment", "x\nAPI_TOKEN=abc123456\ny"),
}

INNOCENT = [
    "num_tokens = s0 * s1",
    "token = torch.ops.prims._make_token.default()",
    "effect_token='primals_1'",
    "def forward(self, tokens: 'f32[8]', secret):",
    "'tokens': ['_sink_tokens_default']",
    "password=None, passwd=password",
    "token_type='CLS'",
    "https://github.com/pytorch/pytorch/issues/97838",
    "http://localhost:8080/a@b",
    "https://example.org:443/path",
    "file:///home/user/x.py:12: in forward @ line",
    "# Topologically Sorted Source Nodes: [mask: Dict[str, int]], see http://x.y/z",
    "JKIA5QPBQTASIAX2LKDPE3VEVYAMUKXKOYA7MQAYUVFZVQAAAAAA",
    "fft3htlfgmqg3rphu5e4vh5s4yubwzlfrdwfr2s5lta55z5pf5yw",
    "task-group-scheduling-with-many-words-and-2-numbers-in-it",
    "hf_config.json, hf_model_loader_with_a_long_name_of_many_parts",
    "-----BEGIN CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----",
    "eyJ is how JSON looks in base64",
    "cpp_fused_tanh_backward_secret_0 = 1",
    "access_key_order: 'row_major'",
    "inductor_config[secret]: None",
    "os.environ.pop('TORCHDYNAMO_REPRO_AFTER', None)",
    "if os.environ['TORCH_LOGS'] == 'all': x = os.environ['TRITON_CACHE_DIR']",
]


@pytest.mark.parametrize("case", sorted(SECRETS))
def test_secret_is_recognised_anywhere_in_a_text(case: str) -> None:
    kind, text = SECRETS[case]
    for data in (text, f"x {text} y", "line\n" * 1000 + f"= {text}\n" + "line\n" * 1000):
        if case == "environment line" and data.startswith("x API"):
            continue
        assert kind in kinds_in(data.encode())
        assert first_secret([b"nothing", data.encode()]) == (1, kind)


@pytest.mark.parametrize("text", INNOCENT)
def test_compilers_output_is_not_taken_for_a_secret(text: str) -> None:
    assert kinds_in(text.encode()) == []
    assert first_secret([text.encode()]) is None


def test_no_hint_is_lost_among_the_families() -> None:
    hints = {hint for pattern in secrets.PATTERNS for hint in pattern.hints}
    assert hints == {hint for _, family in secrets._FAMILIES for hint in family}
    for hint in hints:
        assert hint in set(secrets._hints_in([b"some text, " + hint.upper() + b" and more"]))
    assert not list(secrets._hints_in([b"nothing of it here"]))


def test_every_pattern_has_a_case() -> None:
    assert {pattern.name for pattern in PATTERNS} == {kind for kind, _ in SECRETS.values()}


def test_secret_deep_in_a_large_view_is_found_across_the_parts() -> None:
    secret = SECRETS["redis"][1].encode()
    for place in (0, 1 << 20, (1 << 20) - 10, (2 << 20) + 5, 3 << 20):
        data = bytearray(b"\x01" * (4 << 20))
        data[place : place + len(secret)] = secret
        assert first_secret([memoryview(bytes(data))]) == (0, "url-password")
    assert first_secret([memoryview(bytes(4 << 20))]) is None


@pytest.mark.parametrize(
    "unit",
    [
        "://",
        "://a:",
        "token='",
        "token='1",
        'password="',
        "eyJ",
        "eyJ" + "a" * 400 + ".",
        "-----BEGIN ",
        "sk-" + "a" * 31,
    ],
)
def test_no_text_takes_more_than_linear_time(unit: str) -> None:
    data = (unit * (1 + 500_000 // len(unit))).encode()
    started = time.process_time()
    kinds_in(data)
    assert time.process_time() - started < 10
