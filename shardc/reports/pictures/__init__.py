"""Files that show a record: a page, a trace for Perfetto."""
