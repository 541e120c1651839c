"""Records in, text and pictures out. Nothing is measured here, and PyTorch is not imported.

Start from `fit_text.explain` (a fit as text), `page.html.write_report` (a fit as an HTML page), `frontier.write_frontier`,
`memory.draw_memory` and `schedule.draw`. `region_rows` says what a plan does with each region; `svg` is the drawing plane.
"""

__all__ = ["fit_text", "frontier", "memory", "page", "region_rows", "schedule", "svg"]
