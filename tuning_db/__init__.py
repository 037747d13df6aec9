"""Where results are kept: `store` while tuning, `bundle` for shipping. Importing this package imports neither."""
