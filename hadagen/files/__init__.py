"""Files that others may write too: bounded reads, atomic writes, and locks between processes."""
