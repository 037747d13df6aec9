"""One call: its key, its checks by role, and the operators of `torch.ops.hadagen`."""
