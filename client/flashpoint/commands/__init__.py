"""The command-line application, and the commands that judge and time kernels. They need the extra `cli`."""
