"""The driver, through ctypes, and what it says of a GPU."""
