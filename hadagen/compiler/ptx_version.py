"""The lowest PTX version that a kernel's instructions allow, so that older drivers compile it too.

A compiler writes its own version into the head of all PTX, such as 9.0 by CUDA 13.0, and a driver refuses a version
newer than its CUDA. The instructions themselves are mostly older. Each is in PTX since the version that its "PTX ISA
Notes" give: https://docs.nvidia.com/cuda/parallel-thread-execution/. The same document's "Release Notes" give the
CUDA release and the targets of each version.
"""

from __future__ import annotations

import re

# The version of CUDA 12.0 and driver 525, the oldest that hadagen runs on: nothing is won below it.
_FLOOR = (8, 0)
# The targets of that version. Later targets need a driver that reads later versions, and have their own instructions.
_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a")

_TYPE = r"\.(?:pred|[bsu](?:8|16|32|64)|f(?:16|32|64)|f16x2|bf16|bf16x2|tf32)"
_SPACE = r"(?:\.(?:global|local|const|param|shared(?:::cta|::cluster)?))?"
_COMPARISON = r"\.(?:eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)"
# Version → whole instructions, with all modifiers, that it has. The floor has the instructions of kernels until now,
# and similar ones.
_KNOWN = {
    _FLOOR: (
        r"(?:add|sub|mul|mul24|mad|mad24|fma|div|rem|abs|neg|min|max|sad|ex2|lg2|rcp|sqrt|rsqrt)"
        rf"(?:\.(?:lo|hi|wide|rn|rz|rm|rp|ftz|sat|approx|full|relu|xorsign|abs|NaN))*{_TYPE}",
        rf"(?:and|or|xor|not|cnot|shl|shr|popc|clz|brev|bfe|bfi|bfind|prmt|lop3|mov|selp){_TYPE}",
        rf"shf\.[lr]\.(?:clamp|wrap)\.b32|dp[24]a(?:\.lo|\.hi)?{_TYPE}{_TYPE}",
        rf"setp?{_COMPARISON}(?:\.(?:and|or|xor))?(?:\.ftz)?{_TYPE}(?:{_TYPE})?",
        rf"cvt(?:\.(?:rn|rz|rm|rp|rna|rni|rzi|rmi|rpi|ftz|sat|relu))*{_TYPE}{_TYPE}",
        rf"cvta(?:\.to)?{_SPACE}\.u64",
        rf"(?:ld|st){_SPACE}(?:\.(?:ca|cg|cs|lu|cv|wb|wt|nc|volatile|L1::no_allocate))*(?:\.v[24])?{_TYPE}",
        r"bra(?:\.uni)?|ret|exit|trap|bar\.sync|bar\.warp\.sync|barrier\.sync(?:\.aligned)?|activemask\.b32",
        r"membar\.(?:cta|gl|sys)|fence\.(?:acq_rel|sc)\.(?:cta|cluster|gpu|sys)|nanosleep\.u32",
        r"shfl\.sync\.(?:bfly|idx|up|down)\.b32|vote\.sync\.(?:all|any|uni|ballot)\.(?:pred|b32)",
        r"redux\.sync\.(?:add|min|max|and|or|xor)\.[bsu]32",
        r"mma\.sync\.aligned\.m16n8k(?:4|8|16)\.row\.col(?:\.(?:f16|bf16|tf32|f32)){4}",
        r"wgmma\.mma_async\.sync\.aligned\.m64n(?:64|128|256)k16\.f32(?:\.f16|\.bf16){2}",
        r"wgmma\.(?:fence|commit_group|wait_group)\.sync\.aligned",
        r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16",
        r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x[124](?:\.trans)?\.shared(?:::cta)?\.b16",
        r"cp\.async\.c[ag]\.shared(?:::cta)?\.global|cp\.async\.(?:commit_group|wait_group|wait_all)",
        r"cp\.async\.bulk\.prefetch\.L2\.global",
        r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes(?:\.multicast::cluster)?",
        r"griddepcontrol\.(?:wait|launch_dependents)",
        r"barrier\.cluster\.(?:arrive(?:\.release|\.relaxed)?|wait(?:\.acquire)?)(?:\.aligned)?",
        r"mapa(?:\.shared::cluster)?\.u(?:32|64)",
        rf"mbarrier\.(?:init|inval|arrive(?:\.expect_tx)?){_SPACE}\.b64",
        rf"mbarrier\.(?:test|try)_wait(?:\.parity)?(?:\.acquire\.(?:cta|cluster))?{_SPACE}\.b64",
        r"fence\.mbarrier_init\.release\.cluster|fence\.proxy\.async(?:\.shared::cta|\.global)?",
    ),
    (8, 1): (
        rf"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v[24])?{_TYPE}",
        r"cvt\.rn\.satfinite\.e4m3x2\.f32",  # on sm_89; on sm_90 since 7.8
    ),
}
_SINCE = {version: re.compile("|".join(some)) for version, some in _KNOWN.items()}

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.M)
_TARGET = re.compile(r"^\.target (\w+)$", re.M)
# At the start of a statement, behind a label or a guard if it has one. Directives start with a dot.
_INSTRUCTION = re.compile(r"(?:^|[;{}])\s*(?:[\w$]+:\s+)?(?:@!?[%\w]+\s+)?([a-z](?:[\w.]|::)*)(?=\s|;)", re.M)


def lowered(module: str) -> str:
    """The PTX module with the lowest version in its head that has all its instructions.

    The module stays as it is if this file does not know its target or one of its instructions.
    """
    version, target = _VERSION.search(module), _TARGET.search(module)
    if version is None or target is None or target[1] not in _TARGETS:
        return module
    needed = _FLOOR
    for instruction in set(_INSTRUCTION.findall(re.sub("//.*", "", module))):
        since = next((since for since, known in _SINCE.items() if known.fullmatch(instruction)), None)
        if since is None:
            return module
        needed = max(needed, since)
    if needed >= (int(version[1]), int(version[2])):
        return module
    return f"{module[: version.start()]}.version {needed[0]}.{needed[1]}{module[version.end() :]}"
