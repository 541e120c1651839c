"""A fit as a fragment of HTML, as notebooks show it: the table as text, and the frontier as a picture."""

from __future__ import annotations

from base64 import b64encode
from html import escape

from retape.core.fit_record import FitRecord
from retape.report.fit_text import explain
from retape.report.frontier_file import frontier_svg


def render_fit_html(record: FitRecord) -> str:
    """The explanation of a fit and its frontier. The picture is an image, so that its style stays its own."""
    picture = b64encode(frontier_svg(record).encode()).decode()
    return f'<pre>{escape(explain(record))}</pre>\n<img alt="frontier" src="data:image/svg+xml;base64,{picture}"/>'
