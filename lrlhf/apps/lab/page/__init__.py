"""Reports of sections: on a terminal, or as an HTML file that opens from disk, loading nothing."""

from lrlhf.apps.lab.page.page import (
    Cell,
    Chart,
    Number,
    Section,
    Table,
    Text,
    print_page,
    write_page,
)

__all__ = ["Cell", "Chart", "Number", "Section", "Table", "Text", "print_page", "write_page"]
