"""The right answer: the exact transform, the quantizer in PyTorch, and how far from them a result may be."""
