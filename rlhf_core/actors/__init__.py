"""Thin Ray shells around the engines."""
