"""Recordings of all variants of problems, and searches on them: how soon a search finds the best."""
