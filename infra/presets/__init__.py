"""Ready-made run configurations (TOML)."""
