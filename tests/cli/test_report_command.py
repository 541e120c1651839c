"""`retape report` from outside: a page from a saved fit, without PyTorch, and how it refuses."""

import subprocess
import sys

import pytest

from retape.cli.main import main
from retape.report.page.html import render_report
from support.report_page import Page, large_fit


@pytest.fixture(scope="module")
def record():
    return large_fit(12)


@pytest.fixture
def saved(record, tmp_path):
    file = tmp_path / "fit.json"
    file.write_text(record.to_json(), encoding="utf-8")
    return file


def test_the_page_is_that_of_the_record(saved, record, tmp_path, capsys):
    page = tmp_path / "out.html"
    assert main(["report", str(saved), "-o", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert page.read_text(encoding="utf-8") == render_report(record)


def test_without_a_name_it_stands_beside_the_fit(saved, capsys):
    assert main(["report", str(saved)]) == 0
    assert capsys.readouterr().out.strip() == str(saved.with_suffix(".html"))
    assert saved.with_suffix(".html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_peers_are_drawn(saved, tmp_path):
    peers = tmp_path / "bench.json"
    peers.write_text('{"results": {"per block": {"peak_bytes": 180000000, "seconds": 0.5}}}')
    page = tmp_path / "out.html"
    assert main(["report", str(saved), "-o", str(page), "--peers", str(peers)]) == 0
    assert Page(page.read_text(encoding="utf-8")).count("circle", **{"class": "peer mark"}) == 1


def test_it_needs_no_torch(saved, tmp_path):
    code = (
        "import sys; from retape.cli.main import main;"
        f"assert main(['report', {str(saved)!r}, '-o', {str(tmp_path / 'x.html')!r}]) == 0;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def refused(capsys, *arguments):
    assert main(["report", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_what_cannot_be_read_or_written(saved, tmp_path, capsys):
    said = refused(capsys, str(tmp_path / "none.json"))
    assert "Cannot read the fit of" in said
    assert "No such file or directory. Give a file that Fit.save wrote" in said
    (tmp_path / "other.json").write_text("{}")
    assert "This is no saved fit" in refused(capsys, str(tmp_path / "other.json"))
    assert "Cannot write the report to" in refused(capsys, str(saved), "-o", str(tmp_path / "no" / "x.html"))
