"""Other libraries, with their attention served by Flashpoint."""
