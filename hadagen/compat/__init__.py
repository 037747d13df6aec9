"""Functions of other projects by their own names, so that a program that calls them changes only an import."""
