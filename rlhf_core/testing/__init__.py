"""Fakes and contract suites that ship with the package."""
