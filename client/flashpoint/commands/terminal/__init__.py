"""Format the output of the command line: tables, help texts and streams."""
