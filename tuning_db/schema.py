"""The tables of a tuning database.

They hold every trial, its timings, its errors, and what it ran: problem, kernel and environment, each stored once.
Real columns everywhere; JSON only for knobs. Optuna keeps its own tables (`trials`, `studies`, `alembic_version` …) in
the same database, hence the prefix. SQLite and PostgreSQL have the same tables.

A new database is made from this file, and an older one is brought up to it by migrations. So a change here needs a
migration in `migrations/versions` and a new `SCHEMA_VERSION`. If kernels or trials then say more, the migration empties
their seals: after an upgrade, rows without a seal are given one.
"""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, LargeBinary, MetaData, String, Text, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.types import TypeDecorator

from hadagen.files.opening import inflated
from hadagen.problem.trial import Environment

PREFIX = "hadagen_"
SCHEMA_VERSION = "0009"
VERSION_TABLE = f"{PREFIX}schema_version"


class Compressed(TypeDecorator[bytes]):
    """Bytes that the database keeps compressed: a cubin shrinks to a third, PTX to a tenth."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        return None if value is None else zlib.compress(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> bytes | None:
        if not isinstance(value, bytes | None):  # SQLite keeps whatever it is given
            raise ValueError(f"{value!r:.40} is not compressed")
        return None if value is None else inflated(value)


class Escaped(TypeDecorator[str]):
    """Text that may have NUL, which compilers print and PostgreSQL cannot store: NUL becomes an escape sequence."""

    impl = String
    cache_ok = True
    _ESCAPE = "\x10"

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value and value.replace(self._ESCAPE, self._ESCAPE + "e").replace("\0", self._ESCAPE + "0")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return value and value.replace(self._ESCAPE + "0", "\0").replace(self._ESCAPE + "e", self._ESCAPE)


class EscapedText(Escaped):
    impl = Text
    cache_ok = True


Characters = String().with_variant(Escaped(), "postgresql")
LongText = Text().with_variant(EscapedText(), "postgresql")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_name)s",
        }
    )
    type_annotation_map = {str: Characters, float: Double(), dict[str, Any]: JSON()}  # noqa: RUF012


class ProblemRow(Base):
    __tablename__ = f"{PREFIX}problems"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)


class EnvironmentRow(Base):
    """One row for each distinct `hadagen.problem.trial.Environment`; the same names and the same meaning."""

    __tablename__ = f"{PREFIX}environments"
    __table_args__ = (UniqueConstraint(*(field.name for field in fields(Environment))),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu: Mapped[str]
    compute_capability: Mapped[str]
    sms: Mapped[int]
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    driver: Mapped[str]
    cuda: Mapped[str]
    nvcc: Mapped[str]
    sm_clock_mhz: Mapped[int]
    memory_clock_mhz: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    power_limit_watts: Mapped[int]


class KernelRow(Base):
    """One row for each `hadagen.problem.trial.Kernel`. `threads` … `arithmetic` are the fields of its `LaunchSpec`.

    `seal`: SHA-256 of all that it says.
    """

    __tablename__ = f"{PREFIX}kernels"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(unique=True)
    entry: Mapped[str]
    arch: Mapped[str]
    threads: Mapped[int]
    cluster: Mapped[int]
    shared_bytes: Mapped[int]
    tile_elements: Mapped[int] = mapped_column(BigInteger)
    persistent: Mapped[bool]
    scale_form: Mapped[str]
    params: Mapped[str]  # as its signature
    starts_early: Mapped[bool]
    arithmetic: Mapped[str]
    registers: Mapped[int]
    spill_bytes: Mapped[int]
    static_shared_bytes: Mapped[int]
    nvcc: Mapped[str]
    source: Mapped[str] = mapped_column(LongText)
    ptx: Mapped[bytes] = mapped_column(Compressed)
    cubin: Mapped[bytes] = mapped_column(Compressed)
    seal: Mapped[str]


class TrialRow(Base):
    """One `hadagen.problem.trial.Trial`. `seal`: SHA-256 of all that it says, rows of other tables included."""

    __tablename__ = f"{PREFIX}trials"
    __table_args__ = (UniqueConstraint("problem_id", "arch", "knobs_key", "environment_id", "provenance"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey(ProblemRow.id))
    environment_id: Mapped[int] = mapped_column(ForeignKey(EnvironmentRow.id))
    kernel_id: Mapped[int | None] = mapped_column(ForeignKey(KernelRow.id), index=True)
    arch: Mapped[str]
    knobs: Mapped[dict[str, Any]]
    knobs_key: Mapped[str]  # the knobs as canonical text, so that equal knobs are equal keys
    provenance: Mapped[str]
    outcome: Mapped[str]
    detail: Mapped[str] = mapped_column(LongText)
    date: Mapped[str]
    seconds: Mapped[float]
    seal: Mapped[str]

    problem: Mapped[ProblemRow] = relationship()
    environment: Mapped[EnvironmentRow] = relationship()
    kernel: Mapped[KernelRow | None] = relationship()


class ClaimRow(Base):
    """Work that a run has in progress; see `hadagen.tuning_db.claims`. `work` is the `knobs_key` of a trial to come, or
    the name of other work on the problem; `expires` is a time as `time.time` gives it."""

    __tablename__ = f"{PREFIX}claims"
    __table_args__ = (UniqueConstraint("problem_id", "arch", "gpu", "work"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey(ProblemRow.id))
    arch: Mapped[str]
    gpu: Mapped[str]
    work: Mapped[str]
    owner: Mapped[str]
    expires: Mapped[float]


class ErrorRow(Base):
    """Relative error of a trial for one class of input. SQLite makes a NaN NULL."""

    __tablename__ = f"{PREFIX}errors"

    trial_id: Mapped[int] = mapped_column(ForeignKey(TrialRow.id), primary_key=True)
    input_class: Mapped[str] = mapped_column(primary_key=True)
    relative_error: Mapped[float | None]


class TimingRow(Base):
    """One `hadagen.problem.trial.Timing`; `position` keeps their order. Microseconds."""

    __tablename__ = f"{PREFIX}timings"

    trial_id: Mapped[int] = mapped_column(ForeignKey(TrialRow.id), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    elements: Mapped[int] = mapped_column(BigInteger)
    destination: Mapped[str]
    cache: Mapped[str]
    us: Mapped[float]
    us_low: Mapped[float]
    us_high: Mapped[float]
    copy_us: Mapped[float]
