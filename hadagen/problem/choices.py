"""Types of the names that public functions take: editors complete them, and other text passes type checks too, so that
a caller's `str` does. A function checks the text when it is called."""

from __future__ import annotations

from typing import Literal, TypeAlias

FormatName: TypeAlias = (
    Literal[
        "fp8-group",
        "fp8-row",
        "fp8-tensor",
        "fp8-head",
        "int8-row",
        "int4-row",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "largest",
    ]
    | str
)
RuleName: TypeAlias = (
    Literal[
        "exact",
        "power_of_two",
        "fa3",
        "convrot",
        "quarot",
        "floor",
        "ceil",
        "rceil",
        "even",
        "deepseek_v4",
        "qutlass",
        "transformer_engine",
    ]
    | str
)
LayoutName: TypeAlias = Literal["row-major", "column-major", "packed", "swizzled", "batched-swizzled"] | str
NumericsName: TypeAlias = Literal["accurate", "fast"] | str
