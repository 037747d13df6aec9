"""Steps: the parts of a plan. Each has everything about itself: see `base.Step`."""
