"""The text of the command line: tables, help and streams."""
