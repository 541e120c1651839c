"""Bytes and seconds as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retape.core.errors import InvalidInput
from retape.core.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 1024**3),
        ("8 gib", 8 * 1024**3),
        ("1.5 MB", 1_500_000),
        ("512 B", 512),
        ("3 bytes", 3),
        (".5KiB", 512),
        ("2TiB", 2 * 1024**4),
        ("1e3kB", 1_000_000),
        ("0.0001kB", 0),
    ],
)
def test_parse(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["8 bananas", "", "GiB", "8", "-8GiB", "nan GiB", "inf GiB", "8GiB8", "1.2.3MB", "1e999GiB", "8 G iB", "1e300TiB"],
)
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(InvalidInput) as caught:
        parse_bytes(text)
    expected = f"{text!r} is not a number of bytes. Write one with a unit, such as '8GiB', '512MiB' or '2.5GB'."
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (9663676416, "9.00 GiB"),
        (1024**4, "1.00 TiB"),
        (1024**5, "1024.00 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.5 s"), (0.00213, "2.13 ms"), (3e-6, "3 us"), (0, "0 us"), (2e-9, "0.002 us")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@given(st.integers(0, 2**60))
def test_formatted_bytes_parse_back_to_about_the_same(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006, abs=1)
