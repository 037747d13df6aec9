"""The operands of a rotation besides x: packed matrices and signs, and the modules that hold them."""
