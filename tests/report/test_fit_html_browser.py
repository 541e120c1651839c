"""The report in a real browser: values read out of the page as it stands there, and pictures that are not blank."""

import shutil
import subprocess

import numpy
import pytest

from retape.report.page.html import write_report
from support.report_page import Page, large_fit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is found")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,2600")


@pytest.fixture
def browse(tmp_path):
    """Run the browser on a page from disk, without a network, and return what it prints."""

    def run(page, *flags):
        done = subprocess.run(
            [
                *(CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--proxy-server=127.0.0.1:9"),
                *(*flags, page.as_uri()),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout

    return run


def colours(file):
    """The colours of a picture and how often each stands there, the most frequent last."""
    from matplotlib.image import imread

    picture = (imread(file)[..., :3] * 255).round().astype("uint32")
    found, counts = numpy.unique(picture @ numpy.array([1 << 16, 1 << 8, 1], dtype="uint32"), return_counts=True)
    order = counts.argsort()
    return found[order], counts[order]


def test_values_stand_in_the_browsers_page(browse, fit_in, tmp_path):
    record, page = fit_in(0.5), tmp_path / "report.html"
    write_report(record, page)
    dom = Page(browse(page, "--dump-dom"), xml=False)
    assert int(dom.values["measured-peak-bytes"]) == record.measured.peak_bytes
    assert int(dom.values["promised-peak-bytes"]) == record.plan.promised_peak_bytes
    assert float(dom.values["promised-seconds"]) == record.plan.promised_seconds
    assert dom.elements == Page(page.read_text(encoding="utf-8")).elements  # the browser had nothing to mend


def test_light_and_dark_are_drawn(browse, fit_in, tmp_path):
    page, grounds = tmp_path / "report.html", []
    write_report(fit_in(0.5), page)
    for scheme in (1, 0):  # light, dark
        picture = tmp_path / f"{scheme}.png"
        browse(page, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}")
        found, counts = colours(picture)
        assert len(found) > 100
        assert counts[-2:].sum() < 0.97 * counts.sum()
        grounds.append(int(found[-1]) & 255)
    assert grounds[0] > 200
    assert grounds[1] < 60


def test_a_thousand_regions_open(browse, tmp_path):
    record, page = large_fit(1000), tmp_path / "report.html"
    write_report(record, page)
    dom = Page(browse(page, "--dump-dom"), xml=False)
    assert int(dom.values["budget-bytes"]) == record.budget_bytes
