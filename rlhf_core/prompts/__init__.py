"""Prompt sources, tokenization and the order of prompts."""
