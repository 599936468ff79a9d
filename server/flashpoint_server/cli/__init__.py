"""The commands `flashpoint serve`, `config`, `key` and `health`, and the processes around the application."""
