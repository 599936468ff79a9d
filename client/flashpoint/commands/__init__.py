"""The application of the command line, and the commands that judge and measure. They need the extra `cli`."""
