"""Shared libraries for Linux, read and written without a compiler: just what `torchvision_cpu` needs of the format.

    undefined(path), needed(path)       what a library asks others for
    stand_in(...)                       a library that has some names and does nothing

Sizes and numbers are those of 64-bit little-endian ELF (the System V ABI; `man 5 elf`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DYNSYM, DYNAMIC = 11, 6  # kinds of sections
NEEDED, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 1, 4, 5, 6, 10, 11, 14  # entries of the dynamic table
LOAD, DYNAMIC_SEGMENT, STACK = 1, 2, 0x6474E551  # kinds of segments
EXECUTE, WRITE, READ = 1, 2, 4
HEADER, SEGMENT, SYMBOL, ENTRY = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<IBBHQQ", "<QQ"
PAGE = 0x10000  # no system has larger ones


class Machine(NamedTuple):
    """ELF's number of a processor, and two functions in its code: one returns 0, one ends the process."""

    number: int
    zero: bytes
    trap: bytes


MACHINES = {
    "x86_64": Machine(62, bytes.fromhex("31c0 c3"), bytes.fromhex("0f0b")),  # xor eax, eax; ret / ud2
    "aarch64": Machine(183, bytes.fromhex("000080d2 c0035fd6"), bytes.fromhex("000020d4")),  # mov x0, 0; ret / brk
}


class _Section(NamedTuple):
    data: bytes
    strings: bytes


def _section(path: Path, kind: int) -> _Section:
    """The first section of a kind, with its table of strings."""
    raw = path.read_bytes()
    if raw[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} begins with {raw[:6]!r}; it may be a 64-bit little-endian ELF file")
    header = struct.unpack_from(HEADER, raw)
    start, size, count = header[6], header[11], header[12]
    sections = [struct.unpack_from("<IIQQQQIIQQ", raw, start + i * size) for i in range(count)]
    for section in sections:
        if section[1] == kind:
            own, strings = (raw[s[4] : s[4] + s[5]] for s in (section, sections[section[6]]))
            return _Section(own, strings)
    raise ValueError(f"{path} has no section of kind {kind}; it may be a shared library")


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode()


def undefined(path: Path) -> list[str]:
    """Names that a library takes from others."""
    table = _section(path, DYNSYM)
    symbols = struct.iter_unpack(SYMBOL, table.data)
    return [_text(table.strings, name) for name, _, _, section, _, _ in symbols if name and not section]


def needed(path: Path) -> list[str]:
    """Libraries that a library is loaded with."""
    table = _section(path, DYNAMIC)
    return [_text(table.strings, value) for tag, value in struct.iter_unpack(ENTRY, table.data) if tag == NEEDED]


def stand_in(soname: str, machine: Machine, zeros: Sequence[str], traps: Sequence[str]) -> bytes:
    """A library by the name of `soname`: functions that return 0, and functions that end the process."""
    names = [*zeros, *traps]
    strings, at = b"\0", {}
    for text in (soname, *names):
        at[text] = len(strings)
        strings += text.encode() + b"\0"
    hash_at = struct.calcsize(HEADER) + 4 * struct.calcsize(SEGMENT)
    # One bucket: every name is looked up along one chain, 1 -> 2 -> ... -> 0.
    chain = [0, *range(2, len(names) + 1), 0] if names else [0]
    hashes = struct.pack(f"<{3 + len(chain)}I", 1, len(chain), 1 if names else 0, *chain)
    symbols_at = _round(hash_at + len(hashes), 8)
    strings_at = symbols_at + (1 + len(names)) * struct.calcsize(SYMBOL)
    code_at = _round(strings_at + len(strings), 16)
    code = machine.zero.ljust(16, b"\0") + machine.trap.ljust(16, b"\0")
    symbols = bytes(struct.calcsize(SYMBOL))
    for name in names:
        symbols += struct.pack(SYMBOL, at[name], 0x12, 0, 1, code_at + 16 * (name in traps), 16)  # global, function
    table = {SONAME: at[soname], HASH: hash_at, STRTAB: strings_at, SYMTAB: symbols_at}
    table |= {STRSZ: len(strings), SYMENT: struct.calcsize(SYMBOL), 0: 0}
    dynamic = b"".join(struct.pack(ENTRY, tag, value) for tag, value in table.items())
    parts = {hash_at: hashes, symbols_at: symbols, strings_at: strings, code_at: code}
    return _file(machine, parts, code_at + len(code), dynamic)


def _file(machine: Machine, parts: dict[int, bytes], end: int, dynamic: bytes) -> bytes:
    """Header and segments: what is read and run, what the loader writes to, and a stack that is not run."""
    dynamic_at = _round(end, PAGE)
    segments = (
        (LOAD, READ | EXECUTE, 0, end, PAGE),
        (LOAD, READ | WRITE, dynamic_at, len(dynamic), PAGE),
        (DYNAMIC_SEGMENT, READ | WRITE, dynamic_at, len(dynamic), 8),
        (STACK, READ | WRITE, 0, 0, 16),
    )
    size, each = struct.calcsize(HEADER), struct.calcsize(SEGMENT)
    magic = b"\x7fELF\x02\x01\x01"
    out = bytearray(dynamic_at + len(dynamic))
    struct.pack_into(HEADER, out, 0, magic, 3, machine.number, 1, 0, size, 0, 0, size, each, len(segments), 64, 0, 0)
    for i, (kind, flags, offset, length, align) in enumerate(segments):
        struct.pack_into(SEGMENT, out, size + i * each, kind, flags, offset, offset, offset, length, length, align)
    for offset, data in {**parts, dynamic_at: dynamic}.items():
        out[offset : offset + len(data)] = data
    return bytes(out)


def _round(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
