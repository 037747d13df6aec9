"""Products of codes: of the codes of rows with the codes of a weight, by the fastest library for their sizes."""
