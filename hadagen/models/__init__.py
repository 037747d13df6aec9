"""Rotated and quantized language models: how a checkpoint becomes one, and the layers that run it.

`scheme` says what is quantized, and how; a checkpoint stores it as `quantization_config`. `folding` computes the
rotated weights, `layers` has the linear layers with codes, and `cache` packs keys and values in codes. `checkpoint`
converts a folder of safetensors, and `modules` a model in memory. `evaluate` measures models.
"""
