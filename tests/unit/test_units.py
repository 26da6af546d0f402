"""Amounts of memory: what is read, what is refused, how it is shown."""

import pytest

from regrad.core.errors import USAGE_EXIT, InvalidQuantity
from regrad.core.units import Budget, format_bytes, format_seconds, parse_bytes

GOOD = [
    ("8589934592", 8589934592),
    (8589934592, 8589934592),
    (0, 0),
    ("0", 0),
    ("8 GiB", 8 * 2**30),
    ("8GiB", 8 * 2**30),
    ("8GB", 8 * 10**9),
    ("8 gb", 8 * 10**9),
    (" 3 kB ", 3000),
    ("3 KiB", 3072),
    ("1.5 MiB", 3 * 2**19),
    ("0.5 GB", 5 * 10**8),
    ("2TiB", 2 * 2**40),
    ("2 TB", 2 * 10**12),
    ("12 bytes", 12),
    ("12 B", 12),
    ("1_000", 1000),
    ("1,024 KiB", 2**20),
    ("1.0", 1),
    # too large for a float to hold exactly
    ("9007199254740993", 9007199254740993),
]
BAD = [
    "",
    "  ",
    "GiB",
    "8 Gibibyte",
    "8 X",
    "8 G",
    "-1",
    "-8 GiB",
    "+8 GiB",
    "8..5 GiB",
    ".5 GiB",
    "8 GiB 4",
    "1.5",
    "1.5 B",
    "nan",
    "inf GiB",
    "0x10",
    "1e9",
    "60 %%",
    "9" * 5000,
    "1" * 400 + ".5 GiB",
    -1,
    1.5,
    True,
    None,
    b"8 GiB",
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_amounts_are_read(text, expected):
    count = parse_bytes(text)
    assert count == expected
    assert type(count) is int


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text)[:20])
def test_bad_amounts_are_refused_with_what_was_given_and_what_to_write(text):
    with pytest.raises(InvalidQuantity) as caught:
        parse_bytes(text)
    assert caught.value.text == text
    assert caught.value.exit_code == USAGE_EXIT
    assert "8 GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (100 * 2**20, "100 MiB"),
        (8 * 2**30, "8.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(count, shown):
    assert format_bytes(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(2, "2.00 s"), (0.0125, "12.5 ms"), (-1.5, "-1.50 s"), (0, "0.0 ms")])
def test_seconds_are_shown(seconds, shown):
    assert format_seconds(seconds) == shown


FIGURES = {"persistent_bytes": 1000, "eager_peak_bytes": 3001, "least_bytes": 1234}


@pytest.mark.parametrize(
    ("text", "kind", "resolved"),
    [
        ("2 KiB", "bytes", 2048),
        (77, "bytes", 77),
        ("60%", "share", 1000 + 1200),
        ("12.5 %", "share", 1000 + 250),
        ("100%", "share", 3001),
        ("0%", "share", 1000),
        ("min", "min", 1234),
        (" MIN ", "min", 1234),
    ],
)
def test_budgets_resolve_against_the_model(text, kind, resolved):
    budget = Budget.parse(text)
    assert budget.kind == kind
    assert budget.resolve(**FIGURES) == resolved
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize("text", ["max", "-5%", "%", "5 % of it", "9" * 400 + "%", -3, 0.5, None])
def test_bad_budgets_are_refused(text):
    with pytest.raises(InvalidQuantity):
        Budget.parse(text)
