"""DeviceName: the word for one worker that a cluster, a plan or the command line uses.

==============================  =============================================================
``cpu``                         the processor, all threads, full instruction set
``cpu:threads=1,isa=avx2``      one thread of it, held to an instruction set
``cuda:0``                      a GPU of the host (torch's name; also under ROCm)
``cuda:0/sms=32``               32 of its streaming multiprocessors
``t4``                          a device of the zoo, of which no index is said
==============================  =============================================================
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from foreplan.datasets import device_zoo
from foreplan.errors import SpecError

ISAS = ("sse41", "avx2", "avx512", "avx512_bf16", "native")
"""Instruction sets a CPU worker can be held to, least first; ``native`` holds it to none."""

_EXPECTED = "a device such as cpu, cpu:threads=1,isa=avx2, cuda:0, cuda:0/sms=32 or a zoo name (t4)"
_CUDA = re.compile(r"cuda(?::(?P<index>[0-9]{1,4}))?(?:/sms=(?P<sms>[0-9]{1,4}))?")
_CPU = re.compile(r"cpu(?::(?P<options>.*))?")


@dataclass(frozen=True, slots=True)
class DeviceName:
    """Name of one worker.

    Build it with `parse`; ``str`` gives the canonical form, which parses back to an equal name.

    Attributes:
        kind: ``cpu`` and ``cuda`` are of this host, ``zoo`` is published figures only.
        index: GPU of the host (``cuda``).
        sms: streaming multiprocessors of the slice (``cuda``), ``None`` for the whole GPU.
        threads: threads of the worker (``cpu``), ``None`` for all.
        isa: instruction set (``cpu``), one of `ISAS`; ``None`` where none was said.
        zoo: canonical zoo name (``zoo``).
    """

    kind: Literal["cpu", "cuda", "zoo"]
    index: int | None = None
    sms: int | None = None
    threads: int | None = None
    isa: str | None = None
    zoo: str | None = None

    @classmethod
    def parse(cls, text: str, where: str = "device") -> Self:
        """Read a name.

        Args:
            text: see the module's table; letters' case does not matter.
            where: file and field the name stands in, for the error.

        Raises:
            SpecError: no such form, option, instruction set or zoo device; zero threads or SMs.
        """
        word = text.strip().lower()
        if match := _CUDA.fullmatch(word):
            sms = None if match["sms"] is None else int(match["sms"])
            if sms == 0:
                raise SpecError(where, got=text, expected="at least one SM")
            return cls("cuda", index=int(match["index"] or 0), sms=sms)
        if match := _CPU.fullmatch(word):
            return cls._parse_cpu(match["options"], text, where)
        if not device_zoo.is_known(word) and re.match(r"(cpu|cuda|gpu)\b", word):
            raise SpecError(where, got=text, expected=_EXPECTED)
        try:
            return cls("zoo", zoo=device_zoo.canonical(word, where, ("cpu", "cuda:0")))
        except SpecError as error:
            raise SpecError(where, got=text, expected=_EXPECTED, fix=error.fix) from error

    @classmethod
    def _parse_cpu(cls, options: str | None, text: str, where: str) -> Self:
        found: dict[str, str] = {}
        for option in [] if options is None else options.split(","):
            key, _, value = (part.strip() for part in option.partition("="))
            if key not in ("threads", "isa") or not value or key in found:
                raise SpecError(where, got=text, expected=_EXPECTED)
            found[key] = value
        threads, isa = found.get("threads"), found.get("isa")
        if threads is not None and not re.fullmatch(r"[1-9][0-9]{0,4}", threads):
            raise SpecError(where, got=text, expected="threads as a whole number from 1")
        if isa is not None and isa not in ISAS:
            raise SpecError(where, got=text, expected="isa as one of " + ", ".join(ISAS))
        return cls("cpu", threads=None if threads is None else int(threads), isa=isa)

    def __str__(self) -> str:
        if self.kind == "zoo":
            return str(self.zoo)
        if self.kind == "cuda":
            return f"cuda:{self.index}" + (f"/sms={self.sms}" if self.sms is not None else "")
        options = [f"threads={self.threads}"] if self.threads is not None else []
        options += [f"isa={self.isa}"] if self.isa is not None else []
        return "cpu" + (":" + ",".join(options) if options else "")

    @property
    def any_index(self) -> DeviceName:
        """The same name for every whole GPU of a host; of anything else its own."""
        whole_gpu = self.kind == "cuda" and not self.is_slice
        return dataclasses.replace(self, index=0) if whole_gpu else self

    @property
    def is_slice(self) -> bool:
        """Whether the worker is a part of its chip on purpose, which every result must say."""
        return self.sms is not None or self.threads is not None or self.isa not in (None, "native")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let a spec's field be a name: a text in documents, this type in Python."""

        def read(text: str) -> DeviceName:
            try:
                return cls.parse(text)
            except SpecError as error:
                hint = "" if error.fix is None else f" ({error.fix})"
                raise PydanticCustomError(
                    "device_name", "{expected}", {"expected": error.expected + hint}
                ) from error

        from_text = core_schema.no_info_after_validator_function(read, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=from_text,
            python_schema=core_schema.union_schema(
                [core_schema.is_instance_schema(cls), from_text], mode="left_to_right"
            ),
            serialization=core_schema.to_string_ser_schema(),
        )
