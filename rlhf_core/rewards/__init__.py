"""Reward functions and their contract."""
