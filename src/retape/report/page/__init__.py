"""The HTML report of one fit: one page that opens from disk, without a network and without scripts.

Start from `html.write_report`. `replay` runs the plan on the abstract machine and says what runs when and what the device holds;
`summary`, `memory`, `frontier`, `regions` and `actions` make a section each; `elements` has the style and what sections share.
Nothing is measured here.
"""

__all__ = ["actions", "elements", "frontier", "html", "memory", "regions", "replay", "summary"]
