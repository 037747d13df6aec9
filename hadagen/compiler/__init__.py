"""From a plan to a kernel: the source, its compilers, the cache of what they made, and the emulator on the CPU."""
