"""ORDER: what runs after what, and the command line."""
