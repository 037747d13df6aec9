"""From a problem and knobs to a plan, a checked list of steps: what is legal, what is searched, what it may cost."""
