"""The command line: its application, and the commands that judge and measure. They need the extra `cli`."""
