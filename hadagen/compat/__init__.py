"""Other projects' functions by their own names: a program that calls them changes one import."""
