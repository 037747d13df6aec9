"""Steps: what a plan is made of. Each says all that is said of it: see `base.Step`."""
