"""``rlhf audit``: what a run did, proven from the store alone. Imports neither Prefect nor Ray nor torch."""
