"""`Format`: the codes and scales that a quantizer writes, and the rule by which a group of values gets its scale."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import Any

from hadagen.errors import UsageError, choice, shown


class Element(str, Enum):
    """The type of a code: an 8-bit float of 4 exponent and 3 fraction bits, a 4-bit float of 2 exponent bits and 1
    fraction bit, or an integer. A format of NONE has only scales."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"
    INT8 = "int8"
    INT4 = "int4"
    NONE = "none"

    @property
    def largest(self) -> int:
        return {"e4m3": 448, "e2m1": 6, "int8": 127, "int4": 7, "none": 0}[self.value]

    @property
    def bits(self) -> int:
        return {"e4m3": 8, "e2m1": 4, "int8": 8, "int4": 4, "none": 0}[self.value]


class Layout(str, Enum):
    """How the scales of groups lie in memory.

    row-major         [..., groups]
    column-major      [rows, groups], column after column in memory, each padded with zeros to a multiple of 16 bytes
    packed            [rows, ⌈groups/4⌉] int32, column after column in the same way: the biased exponents of four
                      powers of two, the first in the lowest byte; padded with zeros
    swizzled          [room]: tiles of 128 rows and 4 groups, padded with zeros. In a tile, the scale of row r and group
                      c is at (r % 32) · 16 + (r // 32) · 4 + c
    batched-swizzled  [..., room]: the same for each matrix of x [..., rows, columns]
    """

    ROW_MAJOR = "row-major"
    COLUMN_MAJOR = "column-major"
    PACKED = "packed"
    SWIZZLED = "swizzled"
    BATCHED_SWIZZLED = "batched-swizzled"

    @property
    def in_columns(self) -> bool:
        """Whether columns lie in memory one after the other."""
        return self in (Layout.COLUMN_MAJOR, Layout.PACKED)

    def filled_up(self, rows: int, groups: int, size: int) -> tuple[int, int]:
        """Rows and columns of the memory that holds scales, with the zeros that fill it up. size: bytes of an
        element."""
        of_rows, of_groups = (
            (COLUMN_ALIGNMENT // size, 1) if self.in_columns else (1, 1) if self is Layout.ROW_MAJOR else TILE
        )
        groups = -(-groups // 4) if self is Layout.PACKED else groups
        return -(-rows // of_rows) * of_rows, -(-groups // of_groups) * of_groups


COLUMN_ALIGNMENT = 16  # bytes of a column of scales, as TMA needs
TILE = 128, 4  # rows and groups of a tile of swizzled scales
ROW, TENSOR = 0, -1  # in place of the elements of a group: all of a row, all of x
# The layouts that kernels write. Others are made from row-major scales.
KERNEL_LAYOUTS = Layout.ROW_MAJOR, Layout.COLUMN_MAJOR, Layout.SWIZZLED


@dataclass(frozen=True)
class Format:
    """A format of `FORMATS`, with a rule, a group and a layout.

    scale: the type of a scale: "float32", "e8m0" (a power of two, 2^(byte − 127)), "e4m3", or "input", the type of x.
    group: the group size, the number of neighboring elements of a row with one scale; or `ROW` or `TENSOR`. In the
        format of a kernel, the length of rows replaces `ROW`.
    rule: how the scale follows from amax, as `hadagen.rotate_quantize` says.
    rounded: values are rounded to the type of x before they are quantized, though the format does not ask for that.
    groups, rules, layouts: the possible values, the default first.
    needs_scale: a call gives a scale: for all values, for each head, or for all scales of groups.
    by_head: a call gives a scale for each head. The rows of x are divided evenly among the heads.
    keeps_dimension: scales of rows are [..., 1] for x [..., columns], and not [...].
    """

    name: str
    element: Element
    scale: str
    groups: tuple[int, ...]
    rules: tuple[str, ...] = ("exact",)
    layouts: tuple[Layout, ...] = (Layout.ROW_MAJOR,)
    needs_scale: bool = False
    by_head: bool = False
    keeps_dimension: bool = False
    group: int = ROW
    rule: str = ""
    layout: Layout = Layout.ROW_MAJOR
    rounded: bool = False

    @classmethod
    def choose(cls, name: str, group: int | None, rule: str | None, layout: str) -> Format:
        """The format of a name, with a group, rule and layout. None is the default.

        Raises TypeError for an argument of a wrong type, and `UsageError` for arguments that do not exist together.
        """
        for what, text in (("to", name), ("rule", "" if rule is None else rule), ("layout", layout)):
            if not isinstance(text, str):
                raise TypeError(f"{what} is a {type(text).__name__}; pass a string")
        if group is not None and not isinstance(group, int):
            raise TypeError(f"group is a {type(group).__name__}; pass an integer or None")
        if name not in FORMATS:
            raise UsageError(f"to = {shown(name)} is no format; {choice(name, FORMATS)}")
        known = FORMATS[name]
        if group is not None and group not in known.groups:
            sizes = ", ".join(str(size) for size in known.groups if size > 0) or "none, as its scales are not of groups"
            raise UsageError(f"group = {shown(group)} does not exist for {name}; choose {sizes}")
        layouts = [each.value for each in known.layouts]
        for what, text, texts in (("rule", rule or known.rules[0], known.rules), ("layout", layout, layouts)):
            if text not in texts:
                raise UsageError(f"{what} = {shown(text)} does not exist for {name}; {choice(text, texts)}")
        if layout == Layout.PACKED.value and known.scale == "float32" and rule != "power_of_two":
            raise UsageError(f"layout = packed holds powers of two; choose the rule power_of_two of {name}")
        group = known.groups[0] if group is None else group
        return replace(known, group=group, rule=rule or known.rules[0], layout=Layout(layout))

    @cached_property
    def key(self) -> str:
        """The name of the format in the key of a problem, such as "fp8_group_128", "int8_row_4096_convrot" or
        "mxfp4_32_rceil_swizzled"."""
        parts = [self.name.replace("-", "_"), *([str(self.group)] if self.group > 0 else [])]
        parts += [self.rule] if self.rule != self.rules[0] else []
        parts += [self.layout.value.replace("-", "_")] if self.layout is not Layout.ROW_MAJOR else []
        return "_".join([*parts, *(["rounded"] if self.rounded else [])])

    @classmethod
    def parse(cls, key: str) -> Format:
        """The format of a key. Raises `UsageError` for any other text."""
        digits = re.search("_([0-9]{1,9})(?=_|$)", key)
        group = int(digits[1]) if digits else TENSOR
        for known in FORMATS.values():
            if known.groups[0] == TENSOR or (group > 0 and (ROW in known.groups or group in known.groups)):
                for rule, layout, rounded in product(known.rules, known.layouts, (False, True)):
                    form = replace(known, group=group, rule=rule, layout=layout, rounded=rounded)
                    if form.key == key and layout in KERNEL_LAYOUTS:
                        return form
        raise UsageError(f"{shown(key)} is no format; {choice(key, FORMATS)}")

    def for_rows(self, columns: int, round_first: bool) -> Format:
        """The format of a kernel for rows of `columns` elements. round_first: whether it rounds them to x's type first.
        Raises `UsageError` if groups do not fill a row."""
        self.scales_in_row(columns)
        group = columns if self.group == ROW else self.group
        return replace(self.by_kernels, group=group, rounded=bool(round_first) and not self.rounds_first)

    @property
    def text(self) -> str:
        """The arguments of `rotate_quantize`, as text: "int8-row", or "mxfp4, rule=qutlass, layout=swizzled"."""
        parts = [self.name, *([f"group={self.group}"] if self.group > 0 and self.group != self.groups[0] else [])]
        parts += [f"rule={self.rule}"] if self.rule != self.rules[0] else []
        parts += [f"layout={self.layout.value}"] if self.layout is not Layout.ROW_MAJOR else []
        return ", ".join([*parts, *(["round_first=True"] if self.rounded else [])])

    def __lt__(self, other: Any) -> bool:  # problems are sorted, and have types besides formats
        return self.key < (other.key if isinstance(other, Format) else str(other.value))

    def __gt__(self, other: Any) -> bool:
        return self.key > (other.key if isinstance(other, Format) else str(other.value))

    @property
    def rounds_first(self) -> bool:
        """Whether values are rounded to the type of x before they are quantized."""
        return self.rounded or self.element is Element.INT4 or self.rule == "convrot"

    @property
    def by_kernels(self) -> Format:
        """The format that a kernel writes for this one: with row-major scales, if kernels lack the layout."""
        return self if self.layout in KERNEL_LAYOUTS else replace(self, layout=Layout.ROW_MAJOR)

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds of codes and scales in memory: an `Element`, and a type of scale or "packed", four scales in an
        int32."""
        return self.element.value, "packed" if self.layout is Layout.PACKED else self.scale

    def scale_bytes(self, input_bytes: int) -> int:
        """Bytes of a scale. input_bytes: bytes of an element of x."""
        return {"float32": 4, "input": input_bytes}.get(self.scale, 1)

    def scales_in_row(self, columns: int) -> int:
        """The number of scales of a row. Raises `UsageError` if groups do not fill the row."""
        if self.group in (ROW, TENSOR):
            return 1
        if columns % self.group:
            raise UsageError(
                f"groups of {self.group} do not fill rows of {columns} elements; pad them, or choose a group that does"
            )
        return columns // self.group


POWERS = ("floor", "ceil", "rceil", "even")  # rules that give a power of two
_OF_WORDS = Layout.ROW_MAJOR, Layout.COLUMN_MAJOR, Layout.PACKED
_OF_BYTES = Layout.ROW_MAJOR, Layout.COLUMN_MAJOR, Layout.SWIZZLED, Layout.BATCHED_SWIZZLED
_OF_POWERS = *_OF_BYTES, Layout.PACKED
FORMATS = {
    each.name: each
    for each in (
        Format("fp8-group", Element.E4M3, "float32", (128, 16, 32, 64), ("exact", "power_of_two"), _OF_WORDS),
        Format("fp8-row", Element.E4M3, "float32", (ROW,)),
        Format("fp8-tensor", Element.E4M3, "float32", (TENSOR,), needs_scale=True),
        Format("fp8-head", Element.E4M3, "float32", (TENSOR,), ("exact", "fa3"), needs_scale=True, by_head=True),
        Format("int8-row", Element.INT8, "float32", (ROW,), ("exact", "convrot"), keeps_dimension=True),
        Format("int4-row", Element.INT4, "input", (ROW,), ("exact", "quarot")),
        Format("mxfp8", Element.E4M3, "e8m0", (32,), POWERS, _OF_POWERS),
        Format("mxfp4", Element.E2M1, "e8m0", (32,), (*POWERS, "deepseek_v4", "qutlass"), _OF_POWERS),
        Format("nvfp4", Element.E2M1, "e4m3", (16,), ("exact", "transformer_engine"), _OF_BYTES, needs_scale=True),
        Format("largest", Element.NONE, "float32", (ROW, 16, 32, 64, 128)),
    )
}
