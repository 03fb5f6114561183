# SPDX-License-Identifier: Apache-2.0
"""Environments and requirements: the format, the comparisons, and what each kind needs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.digest import digest_of
from torchrelay.environment import (
    FACETS,
    REQUIRED_FACETS,
    SETTINGS,
    Environment,
    FacetValue,
    diff_settings,
    explain,
    exports,
    mismatches,
    parse_environment,
    requires_of,
)
from torchrelay.errors import FormatError, UsageError
from torchrelay.limits import MAX_DOCUMENT_BYTES

FULL: dict[str, FacetValue] = {
    "torch": "2.13.0+cpu " + "d3" * 32,
    "triton": "3.9.0",
    "python": "cpython-3.11",
    "machine": "x86_64",
    "cuda": "none",
    "hip": "none",
    "gpu_name": "none",
    "gpu_arch": "none",
    "cpu_isa": "avx512",
    "vector_isa": ("avx512", "avx512_vnni"),
    "openmp": "libgomp",
    "cpu_threads": 8,
    "glibc": "2.36",
    "libstdcxx": "3.4.30",
    "cpu_flags": ("avx2", "avx512f", "fma"),
}
HERE = Environment(1, FULL, {"precompile_headers": "1", "threads": "8", "cache_key_tag": ""})


def changed(**facets: FacetValue) -> Environment:
    return Environment(1, {**FULL, **facets}, HERE.settings)


texts = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789_.+-é ", max_size=40)
lists = st.lists(texts, unique=True, max_size=8).map(lambda found: tuple(sorted(found)))
values = st.one_of(texts, st.integers(min_value=-(2**40), max_value=2**40), lists)
names = st.from_regex(r"\A[a-z][a-z0-9_]{0,20}\Z")
environments = st.builds(
    lambda facets, settings: Environment(1, facets, settings),
    st.dictionaries(st.one_of(names, st.sampled_from(sorted(FACETS))), values, max_size=20),
    st.dictionaries(names, texts, max_size=10),
)


@given(environments)
def test_an_environment_survives_storage(environment: Environment) -> None:
    assert parse_environment(environment.encode()) == environment
    assert environment.digest == digest_of(environment.encode())


@given(environments)
def test_the_order_of_members_does_not_matter(environment: Environment) -> None:
    other = Environment(
        1, dict(reversed(environment.facets.items())), dict(reversed(environment.settings.items()))
    )
    assert other.digest == environment.digest


@given(environments)
def test_an_entry_fits_where_it_was_made(environment: Environment) -> None:
    known = {name: value for name, value in environment.facets.items() if name in FACETS}
    own = Environment(1, known, {})
    needed = requires_of(own, known)
    superset_only_of_lists = {
        name
        for name, value in needed.items()
        if FACETS[name].comparison == "superset" and not isinstance(value, tuple)
    }
    assert {m.facet for m in mismatches(needed, own)} == superset_only_of_lists


VERSIONS = st.lists(st.integers(0, 999), min_size=1, max_size=4)


@given(VERSIONS, VERSIONS)
def test_versions_are_compared_as_numbers(needed: list[int], here: list[int]) -> None:
    text = ".".join(map(str, needed))
    fits = not mismatches({"glibc": text}, changed(glibc=".".join(map(str, here))))
    padded = [found + [0] * (4 - len(found)) for found in (needed, here)]
    assert fits == (padded[1] >= padded[0])


@pytest.mark.parametrize(
    ("facet", "needed", "here", "fits"),
    [
        ("torch", "2.13.0+cpu aa", "2.13.0+cpu aa", True),
        ("torch", "2.13.0+cpu aa", "2.13.0+cpu bb", False),  # same version, edited or nightly sources
        ("torch", "2.13.0+cpu aa", "2.13.0+cu130 aa", False),
        ("python", "cpython-3.13", "cpython-3.13t", False),
        ("cpu_isa", "avx512", "avx2", False),
        ("cpu_isa", "avx2", "avx512", False),
        ("vector_isa", ("avx512",), ("avx512", "avx512_vnni"), False),
        ("cpu_threads", 8, 8, True),
        ("cpu_threads", 8, "8", False),
        ("glibc", "2.36", "2.36", True),
        ("glibc", "2.9", "2.36", True),  # not by text
        ("glibc", "2.36", "2.9", False),
        ("glibc", "2.36.0", "2.36", True),
        ("glibc", "2.36", "none", False),  # musl
        ("glibc", "none", "2.36", False),
        ("glibc", "none", "none", True),
        ("glibc", "2.36", "2.36-dev", False),
        ("glibc", "2." + "9" * 5000, "2.36", False),
        ("libstdcxx", "3.4.30", "3.4.9", False),
        ("cpu_flags", ("avx2",), ("avx2", "fma"), True),
        ("cpu_flags", ("avx2", "fma"), ("avx2",), False),
        ("cpu_flags", (), ("avx2",), True),
        ("cpu_flags", "avx2", ("avx2",), False),
        ("cpu_flags", ("avx2",), "avx2 fma", False),
    ],
)
def test_comparisons(facet: str, needed: FacetValue, here: FacetValue, fits: bool) -> None:
    environment = changed(**{facet: here})
    (result,) = explain({facet: needed}, environment)
    assert result.ok is fits
    assert bool(mismatches({facet: needed}, environment)) is not fits
    assert bool(result.remedy) is not fits


def test_an_unknown_facet_never_fits() -> None:
    (result,) = mismatches({"quantum_bits": 3}, Environment(1, {"quantum_bits": 3}, {}))
    assert (result.facet, result.comparison, result.ok) == ("quantum_bits", "unknown", False)
    assert "Upgrade torchrelay" in result.remedy


def test_a_facet_that_the_machine_does_not_state_never_fits() -> None:
    (result,) = mismatches({"openmp": "libgomp"}, Environment(1, {}, {}))
    assert result.here is None
    assert "not stated" in result.detail


def test_details_name_only_what_is_missing() -> None:
    (result,) = mismatches({"cpu_flags": ("amx_tile", "avx2")}, HERE)
    assert result.detail == "missing here: amx_tile"
    (result,) = mismatches({"glibc": "2.39"}, HERE)
    assert result.detail == "needs at least 2.39, here 2.36"


def test_explain_lists_every_facet_in_order() -> None:
    results = explain(requires_of(HERE, REQUIRED_FACETS["cpp"]), HERE)
    assert [r.facet for r in results] == sorted(REQUIRED_FACETS["cpp"])
    assert all(r.ok for r in results)


@pytest.mark.parametrize("what", sorted(REQUIRED_FACETS))
def test_every_required_facet_exists_and_fits_at_home(what: str) -> None:
    assert set(REQUIRED_FACETS[what]) <= set(FACETS)
    assert REQUIRED_FACETS[what]
    assert not mismatches(requires_of(HERE, REQUIRED_FACETS[what]), HERE)


# What must never be installed on a machine that differs in one facet, and what may be.
CONFUSIONS = [
    ({"cpu_isa": "avx2"}, {"inductor+cpp", "inductor+cpp+gpu", "cpp", "precompile", "gemm", "tree"}),
    ({"vector_isa": ("avx2",)}, {"inductor+cpp", "inductor+cpp+gpu", "cpp", "precompile", "gemm", "tree"}),
    ({"cpu_flags": ("avx2", "fma")}, {"cpp", "tree"}),
    ({"glibc": "2.31"}, {"cpp", "triton+host", "tree"}),
    ({"libstdcxx": "3.4.28"}, {"cpp", "triton+host", "tree"}),
    ({"openmp": "libiomp5"}, {"cpp", "tree"}),
    ({"triton": "3.8.0"}, {"inductor+gpu", "inductor+cpp+gpu", "triton", "triton+host"}),
    (
        {"gpu_name": "NVIDIA L4"},
        {"inductor+gpu", "inductor+cpp+gpu", "autotune", "gemm", "precompile", "tree"},
    ),
    ({"gpu_arch": "sm_89"}, {"inductor+gpu", "inductor+cpp+gpu", "autotune", "gemm", "precompile", "tree"}),
    ({"cpu_threads": 4}, {"inductor+cpp", "inductor+cpp+gpu", "precompile", "tree"}),
    ({"python": "cpython-3.12"}, {w for w in REQUIRED_FACETS if w not in ("triton", "autotune", "gemm")}),
    ({"torch": "2.14.1+cpu ff"}, {w for w in REQUIRED_FACETS if not w.startswith("triton")}),
    (
        {"machine": "aarch64"},
        {"inductor", "inductor+cpp", "inductor+gpu", "cpp", "triton+host", "gemm", "tree"},
    ),
]


@pytest.mark.parametrize(("difference", "refused"), CONFUSIONS)
def test_entries_that_could_be_used_wrongly_do_not_fit(
    difference: dict[str, FacetValue], refused: set[str]
) -> None:
    other = changed(**difference)
    for what in refused:
        assert [m.facet for m in mismatches(requires_of(HERE, REQUIRED_FACETS[what]), other)] == list(
            difference
        )


def test_triton_groups_travel_between_hosts() -> None:
    other = changed(machine="aarch64", python="cpython-3.13", torch="3.0 ff", gpu_arch="sm_89", glibc="2.17")
    assert not mismatches(requires_of(HERE, REQUIRED_FACETS["triton"]), other)


def test_an_aot_entry_is_independent_of_the_cpu() -> None:
    other = changed(cpu_isa="avx2", vector_isa=("avx2",), cpu_flags=(), cpu_threads=1, machine="aarch64")
    assert not mismatches(requires_of(HERE, REQUIRED_FACETS["aot_autograd"]), other)


def test_an_optional_facet_is_needed_only_where_it_was_stated() -> None:
    newer = Environment(1, {k: v for k, v in FULL.items() if k != "cpu_threads"}, {})
    assert "cpu_threads" not in requires_of(newer, REQUIRED_FACETS["inductor+cpp"])
    assert requires_of(HERE, REQUIRED_FACETS["inductor+cpp"])["cpu_threads"] == 8


@pytest.mark.parametrize("missing", ["cpu_isa", "quantum_bits"])
def test_an_environment_without_a_needed_facet_is_refused(missing: str) -> None:
    poorer = Environment(1, {k: v for k, v in FULL.items() if k != missing}, {})
    with pytest.raises(UsageError, match=missing):
        requires_of(poorer, (*REQUIRED_FACETS["cpp"], missing))


def document(**changes: object) -> bytes:
    # By another encoder: some of these are values that ours refuses to write.
    whole = {"format": 1, "facets": {}, "settings": {}} | changes
    return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        document(format=2),
        document(format="1"),
        document(format=True),
        document(extra=1),
        document(facets={"torch": None}),
        document(facets={"torch": 1.5}),
        document(facets={"cpu_threads": 2**53}),
        document(facets={"torch": True}),
        document(facets={"torch": {"deep": 1}}),
        document(facets={"Torch": "x"}),
        document(facets={"../x": "x"}),
        document(facets={"": "x"}),
        document(facets={"a" * 65: "x"}),
        document(facets={"torch": "x" * 513}),
        document(facets={"cpu_flags": ["b", "a"]}),
        document(facets={"cpu_flags": ["a", "a"]}),
        document(facets={"cpu_flags": ["x" * 513]}),
        document(facets={"cpu_flags": [f"{i:04}" for i in range(257)]}),
        document(facets={"cpu_flags": [1]}),
        document(facets={f"f{i}": "x" for i in range(65)}),
        document(settings={"threads": 2}),
        document(settings={"Threads": "2"}),
        document(settings={"threads": "x" * 513}),
        document() + b" ",
        b" " + document(),
        document().replace(b'"format":1', b'"format":1,"format":1'),
        document().replace(b'"format":1', b'"format": 1'),
        b'{"facets":{},"format":1,"settings":{}',
        b'{"facets":' + b"[" * 1_000_000 + b"}",
        b"\x80\x04canary",
        b'{"facets":{"torch":"\xff"},"format":1,"settings":{}}',
        b" " * (MAX_DOCUMENT_BYTES + 1),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_bad_documents_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        parse_environment(data, name="environments/abc")
    assert caught.value.remedy
    assert "environments/abc" in caught.value.message


def test_the_documented_example_is_what_is_stored() -> None:
    environment = Environment(1, {"glibc": "2.36", "cpu_flags": ("avx2", "fma")}, {"threads": "8"})
    expected = b'{"facets":{"cpu_flags":["avx2","fma"],"glibc":"2.36"},"format":1,"settings":{"threads":"8"}}'
    assert environment.encode() == expected
    assert json.loads(expected)["format"] == 1


def test_settings_that_differ_are_named() -> None:
    other = Environment(1, FULL, {"precompile_headers": "0", "threads": "8", "future": "x"})
    assert diff_settings(HERE, other) == [
        ("cache_key_tag", "", None),
        ("future", None, "x"),
        ("precompile_headers", "1", "0"),
    ]
    assert diff_settings(HERE, HERE) == []


def test_exports_name_what_is_not_the_default() -> None:
    settings = {
        "precompile_headers": "0",
        "threads": "8",
        "cache_key_tag": "v2",
        "cpp_compiler": "g++",
        "x": "1",
    }
    assert exports(Environment(1, {}, settings)) == {
        "OMP_NUM_THREADS": "8",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCH_COMPILE_CACHE_KEY_TAG": "v2",
    }


def test_every_exported_variable_is_told_once() -> None:
    variables = [setting.variable for setting in SETTINGS.values() if setting.variable]
    assert len(variables) == len(set(variables))
