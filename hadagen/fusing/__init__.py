"""`hadagen.fuse`: a pass of torch.compile that makes one operator of what runs before a rotation, the rotation, and the
quantizer after it. docs/fusing.md says what is fused."""
