"""`flashpoint serve`, `key` and `health`, and the processes around the application."""
