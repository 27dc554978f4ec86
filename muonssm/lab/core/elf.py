"""Read and write Linux shared libraries without a compiler, as far as `torchvision_cpu` needs it.

    undefined(path), needed(path)       symbols and libraries that a library requires
    stand_in(...)                       a library that defines given symbols and does nothing

Sizes and numbers are those of 64-bit little-endian ELF (the System V ABI; `man 5 elf`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DYNSYM, DYNAMIC = 11, 6  # section types
NEEDED, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 1, 4, 5, 6, 10, 11, 14  # entries of the dynamic table
LOAD, DYNAMIC_SEGMENT, STACK = 1, 2, 0x6474E551  # segment types
EXECUTE, WRITE, READ = 1, 2, 4
HEADER, SEGMENT, SYMBOL, ENTRY = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<IBBHQQ", "<QQ"
PAGE = 0x10000  # the largest page size of any supported system


class Machine(NamedTuple):
    """A processor: its ELF number, and machine code that returns 0 (`zero`) or ends the process (`trap`)."""

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


def _section(path: Path, section_type: int) -> _Section:
    """The first section of a type, with its string table."""
    raw = path.read_bytes()
    if raw[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} must be a 64-bit little-endian ELF file, got one that starts with {raw[:6]!r}")
    header = struct.unpack_from(HEADER, raw)
    start, size, count = header[6], header[11], header[12]
    sections = [struct.unpack_from("<IIQQQQIIQQ", raw, start + i * size) for i in range(count)]
    for section in sections:
        if section[1] == section_type:
            own, strings = (raw[s[4] : s[4] + s[5]] for s in (section, sections[section[6]]))
            return _Section(own, strings)
    raise ValueError(f"{path} must be a shared library, got a file without a section of type {section_type}")


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode()


def undefined(path: Path) -> list[str]:
    """Symbols that a library requires from other libraries."""
    table = _section(path, DYNSYM)
    symbols = struct.iter_unpack(SYMBOL, table.data)
    return [_text(table.strings, name) for name, _, _, section, _, _ in symbols if name and not section]


def needed(path: Path) -> list[str]:
    """Names of the libraries that a library depends on."""
    table = _section(path, DYNAMIC)
    return [_text(table.strings, value) for tag, value in struct.iter_unpack(ENTRY, table.data) if tag == NEEDED]


def stand_in(soname: str, machine: Machine, zeros: Sequence[str], traps: Sequence[str]) -> bytes:
    """Build the library `soname`: functions `zeros` return 0, functions `traps` end the process."""
    names = [*zeros, *traps]
    strings, at = b"\0", {}
    for text in (soname, *names):
        at[text] = len(strings)
        strings += text.encode() + b"\0"
    hash_at = struct.calcsize(HEADER) + 4 * struct.calcsize(SEGMENT)
    # One hash bucket: every lookup follows one chain, 1 -> 2 -> ... -> 0.
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
    contents = {hash_at: hashes, symbols_at: symbols, strings_at: strings, code_at: code}
    return _file(machine, contents, code_at + len(code), dynamic)


def _file(machine: Machine, contents: dict[int, bytes], end: int, dynamic: bytes) -> bytes:
    """Put header and segments together: code, the table that the loader writes to, and a non-executable stack."""
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
    for i, (segment_type, flags, offset, length, align) in enumerate(segments):
        struct.pack_into(
            SEGMENT, out, size + i * each, segment_type, flags, offset, offset, offset, length, length, align
        )
    for offset, data in {**contents, dynamic_at: dynamic}.items():
        out[offset : offset + len(data)] = data
    return bytes(out)


def _round(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
