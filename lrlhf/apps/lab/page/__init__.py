"""Static pages: one HTML file that opens from disk, in light and dark, and loads nothing."""

from lrlhf.apps.lab.page.page import Chart, Number, Section, Table, Text, write_page

__all__ = ["Chart", "Number", "Section", "Table", "Text", "write_page"]
