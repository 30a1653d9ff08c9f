"""``rlhf gc``: what killed processes left behind, and what of it may go."""
