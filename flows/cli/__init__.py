"""The command ``rlhf``."""
