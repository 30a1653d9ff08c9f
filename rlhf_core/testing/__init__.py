"""Tiny models for tests, shipped with the package."""
