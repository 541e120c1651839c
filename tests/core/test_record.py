"""Records: JSON both ways, and what cannot be one."""

import json

import pytest

from retape.core.errors import InvalidInput, PlanFormatError
from retape.core.record import MemorySample, Record

RECORD = Record(
    peak_bytes=300,
    seconds=0.1 + 0.2,
    timeline=(MemorySample(seconds=0.0, live_bytes=100), MemorySample(seconds=1 / 3, live_bytes=300)),
    base_bytes=100,
    reserved_bytes=512,
    device="cuda:0",
)


def test_round_trip(tmp_path):
    assert Record.from_json(RECORD.to_json()) == RECORD
    RECORD.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == RECORD
    assert RECORD.step_bytes == 200


@pytest.mark.parametrize("change", [{"peak_bytes": -1}, {"base_bytes": 1.5}, {"reserved_bytes": True}])
def test_bytes_that_cannot_be_meant(change):
    with pytest.raises(InvalidInput, match="give a whole number of bytes >= 0"):
        Record(**{"peak_bytes": 1, "seconds": 1.0, **change})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1"])
def test_seconds_that_cannot_be_meant(seconds):
    with pytest.raises(InvalidInput, match="give a finite number of seconds >= 0"):
        Record(peak_bytes=1, seconds=seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "This is no record"),
        ("[]", "This is no record"),
        ("{}", "This is no record"),
        (json.dumps({**json.loads(RECORD.to_json()), "version": 99}), "version 99"),
        (json.dumps({**json.loads(RECORD.to_json()), "more": 1}), "record is invalid"),
        (json.dumps({**json.loads(RECORD.to_json()), "timeline": [[1]]}), "record is invalid"),
        (json.dumps({**json.loads(RECORD.to_json()), "timeline": None}), "record is invalid"),
        (json.dumps({**json.loads(RECORD.to_json()), "peak_bytes": -5}), "record is invalid"),
    ],
)
def test_forged_text(text, message):
    with pytest.raises(PlanFormatError, match=message):
        Record.from_json(text)
