"""What people look at: curves, tables, pages, the report."""
