"""Random functions with an activation, a rotation and a quantizer, and what may stand around and between them."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch.nn.functional import gelu, relu, silu

from hadagen import Rotation, hadamard_transform, rotate_quantize
from hadagen.prologues import Gelu, Relu2, SiluMul

Tensor = torch.Tensor
M, FP8 = 64, torch.float8_e4m3fn  # columns that are rotated
TYPES = torch.bfloat16, torch.bfloat16, torch.float16, torch.float32
ROTATIONS: list[Callable[[Tensor], Tensor]] = [
    Rotation(M),
    Rotation(M, block=32, signs=[1, -1] * 16),
    Rotation(M, block=16).inverse,
    Rotation(M, "regular"),
    Rotation(M, [torch.linalg.qr(torch.arange(1.0, 17).view(4, 4).sin())[0], torch.eye(16)]),
    lambda x: hadamard_transform(x, 0.125),
    partial(Rotation(M), before=Gelu(numerics="eager")),
    partial(Rotation(M, block=32), before=Relu2()),
]
WIDE = [partial(Rotation(M), before=SiluMul(layout=layout)) for layout in ("halves", "interleaved")]
UNARY: list[Callable[[Tensor], Tensor]] = [
    gelu,
    partial(gelu, approximate="tanh"),
    lambda x: x * torch.sigmoid(1.702 * x),
    lambda x: relu(x).square(),
    lambda x: relu(x) ** 2,
    relu,
    silu,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda g, u: silu(g) * u,
    lambda g, u: u * silu(g),
    lambda g, u: g * torch.sigmoid(g) * u,
    lambda g, u: g * torch.sigmoid(g * 1.5) * u,
    lambda g, u: silu(g.clamp(max=1.0)) * u.clamp(-1.0, 1.0),
    lambda g, u: (u.clamp(-2, 2) + 1) * (g.clamp(max=2) * torch.sigmoid(g.clamp(max=2) * 1.702)),
    lambda g, u: gelu(g) * u,
    lambda g, u: gelu(g, approximate="tanh") * u,
    lambda g, u: g * u,
    lambda g, u: silu(g) * u.relu(),
    lambda g, u: silu(u) * g,
    lambda g, u: silu(g) * u * 0.5,
    lambda g, u: silu(g) + u,
]
HALVES: list[Callable[[Tensor], Any]] = [
    lambda x: x.chunk(2, -1),
    lambda x: x.split([M, M], -1),
    lambda x: (x[..., :M], x[..., M:]),
    lambda x: (x.narrow(-1, 0, M), x.narrow(-1, M, M)),
    lambda x: (x[..., ::2], x[..., 1::2]),
    lambda x: x.unflatten(-1, (2, M)).unbind(-2),
    lambda x: (x[..., : M + M // 2][..., :M], x[..., -M:]),
    lambda x: (x[..., M:], x[..., :M]),
]
# Views and copies of rows. The last ones move or join them.
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.flatten(0, -2),
    lambda y: y.transpose(0, -2),
    lambda y: y.movedim(0, -2),
    lambda y: y.unsqueeze(0),
    lambda y: y.unsqueeze(-2).squeeze(-2),
    lambda y: y.contiguous(),
    lambda y: y.transpose(0, -2).contiguous(),
    lambda y: y.float(),
    lambda y: y.view(y.shape),
    lambda y: y.unflatten(-1, (2, M // 2)).flatten(-2),
    lambda y: y.clone(memory_format=torch.contiguous_format),
    lambda y: y.unflatten(-1, (2, M // 2)).transpose(-2, -3).flatten(-2).reshape(-1, M),
    lambda y: y.flip(-1),
    lambda y: y[..., :1, :],
    lambda y: y.expand(2, *y.shape),
]
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x,
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    lambda x: torch.stack([x, x], -1)[..., 0],
]
CALLS: list[dict[str, Any]] = [
    {"to": "int8-row"},
    {"to": "int4-row"},
    {"to": "fp8-row"},
    {"to": "mxfp8"},
    {"to": "mxfp4", "layout": "swizzled"},
    {"to": "fp8-group", "group": 32, "layout": "column-major"},
    {"to": "fp8-tensor", "tensor_scale": 0.05},
    {"to": "int8-row", "rule": "convrot"},
    {"to": "int8-row", "scale": 0.5},
]


def _dynamic(y: Tensor, s: Tensor, amax: Callable[[Tensor], Tensor], by: Any, least: float) -> Any:
    scale = (amax(y).float() / 448.0).clamp(min=least)
    return by(y, scale).clamp(-448.0, 448.0).to(FP8), scale


def _static(y: Tensor, s: Tensor, by: Any, limit: float) -> Any:
    return by(y, s).clamp(-limit, limit).to(FP8), s


def _called(y: Tensor, s: Tensor, options: dict[str, Any]) -> Any:
    q = rotate_quantize(y, None, **options)
    return q.codes, q.scales


BY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda y, s: y.float() / s,
    lambda y, s: y.float() * s.reciprocal(),
    lambda y, s: y / s,
    lambda y, s: y.float() * s,
]
AMAX: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.abs().amax(-1).unsqueeze(-1),
    lambda y: y.abs().max(-1, keepdim=True)[0],
    lambda y: y.abs().amax(-1, keepdim=True),
    lambda y: y.abs().amax((-1, -2), keepdim=True),
]
SCALES: list[Callable[[Tensor], Tensor]] = [  # of float32 [4]
    lambda s: s[0],
    lambda s: s[1:2],
    lambda s: s[2].view(1, 1),
    lambda s: s[3:].view(1, 1, 1),
    lambda s: s.amax(),
    lambda s: s[0] * 2,
    lambda s: s[0].bfloat16(),
    lambda s: s[0].double(),
    lambda s: s[:1].expand(M),
]


class Case(NamedTuple):
    """A function of x and scales, and its arguments."""

    model: Callable[..., Any]
    arguments: Callable[[int], list[Tensor]]
    sizes: tuple[int, ...]
    words: str


def case(seed: int) -> Case:
    """The function of a seed, which may be one that PyTorch refuses."""
    random = Random(seed)

    def maybe(chance: float) -> bool:
        return random.random() < chance

    dtype, is_dynamic = random.choice(TYPES), maybe(0.2)
    kind = random.choice(("binary", "binary", "unary", "none", "wide"))
    shape = [random.choice((2, 3, 5)) for _ in range(random.choice((1, 2, 2, 3)))]
    columns = 2 * M if kind in ("binary", "wide") else M
    layout = random.choice(LAYOUTS)
    first, between, after, on_x = (maybe(chance) for chance in (0.25, 0.1, 0.1, 0.1))
    halves, wide_type = random.choice(HALVES[:5] if maybe(0.7) else HALVES), maybe(0.15)
    active = random.choice(BINARY if kind == "binary" else UNARY)
    before, behind = (
        [random.choice(VIEWS[: -4 if maybe(0.8) else None]) for _ in range(random.choice((0, 0, 1, 1, 2)))]
        for _ in "ab"
    )
    rotation = random.choice(WIDE if kind == "wide" else ROTATIONS[:6] if maybe(0.8) else ROTATIONS)
    scale = random.choice(SCALES)
    quantizer: Any = random.choice(
        (
            None,
            partial(_called, options=random.choice(CALLS)),
            partial(
                _static, by=random.choice(BY[:3] if maybe(0.9) else BY), limit=random.choice((448.0,) * 9 + (240.0,))
            ),
            partial(_static, by=random.choice(BY[:2]), limit=448.0),
            partial(
                _dynamic,
                amax=random.choice(AMAX),
                by=random.choice(BY[:3]),
                least=1 / (448 * (512 if maybe(0.9) else 1)),
            ),
        )
    )
    kept = {each for each in ("g", "product", "turned", "rows") if maybe(0.06)}
    is_twice = maybe(0.1)

    def model(x: Tensor, s: Tensor) -> Any:
        found: dict[str, Any] = {}
        if on_x:
            x.mul_(1.25)
        y = x * 1.5 if first else x
        y = y.float() if wide_type else y
        if kind == "binary":
            g, u = halves(y)
            found["g"] = g
            y = active(g, u)
        elif kind == "unary":
            y = active(y)
        y = y.to(dtype)
        found["product"] = y
        for view in before:
            y = view(y)
        y = found["turned"] = rotation(y)
        if between:
            y = y.mul_(0.5)
        for view in behind:
            y = view(y)
        found["rows"] = y
        out = [found[each] for each in sorted(kept & set(found))]
        if quantizer is None:
            out.append(y)
        else:
            codes, scales = quantizer(y, scale(s))
            out += [codes, scales * 2 if after else scales]
            if is_twice:
                out += [*quantizer(y, scale(s)), codes.view(torch.uint8) + 1]
        if after:
            x.zero_()
        return tuple(out)

    def arguments(at: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed + at)
        x = layout(torch.randn(shape[0] + at, *shape[1:], columns, generator=generator).to(dtype))
        if is_dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        return [x, torch.rand(4, generator=generator) * 0.05 + 0.01]

    words = f"{seed}: {dtype} {shape} {kind} {'dynamic' if is_dynamic else ''}"
    return Case(model, arguments, (0, 1, 3) if is_dynamic else (0,), words)


def difference(found: Tensor, wanted: Tensor) -> str | None:
    """How results differ more than by roundings; None if they do not."""
    forms = [
        (each.dtype, each.shape, [b for a, b in zip(each.shape, each.stride(), strict=True) if a > 1])
        for each in (found, wanted)
    ]
    if forms[0] != forms[1]:
        return f"{forms[0]} for {forms[1]}"
    if not wanted.is_floating_point() and wanted.dtype != torch.int8:
        return None if float((found != wanted).float().mean()) < 0.2 else "other packed codes"
    mine, theirs = found.double(), wanted.double()
    if wanted.dtype == FP8:
        allowed = torch.maximum(mine.abs(), theirs.abs()) / 8 + 4  # where values cancel
    elif wanted.dtype == torch.int8:
        allowed = torch.full_like(mine, 2)
    else:
        most = theirs.abs().amax() if theirs.numel() else 0
        allowed = torch.full_like(mine, float(most) * {torch.float16: 2**-8}.get(wanted.dtype, 2**-5) + 1e-30)
    wrong = ~((mine - theirs).abs() <= allowed) & ~(mine.isnan() & theirs.isnan())
    return f"{int(wrong.sum())} of {wrong.numel()} differ" if wrong.any() else None
