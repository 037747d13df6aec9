"""Which kernel of which bundle a call runs, and why there is none."""
