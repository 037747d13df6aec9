"""Functions of other projects by their own names, so that a program that calls them changes only an import.

    from hadagen.compat.fast_hadamard_transform import hadamard_transform

fast_hadamard_transform: functions of the package of this name.
hadacore: `hadamard_transform` of HadaCore, and `hadacore_transform` of vLLM.
quarot: functions of QuaRot's `hadamard_utils`, and of SpinQuant and QuIP#.
sglang: functions of SGLang's `sgl_kernel.hadamard`.

docs/compat.md compares each module with its original.
"""
