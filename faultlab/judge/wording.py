"""The words of reasons: ranks, seconds, sizes and counts, always said in the same way.

Promise: pure text, short enough for a line of a log even with 128 ranks. A new
invariant uses these, so that all reasons read alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def ranks(numbers: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0-7 and 12``."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for index in range(len(ordered)):
        if index + 1 < len(ordered) and ordered[index + 1] == ordered[index] + 1:
            continue
        run = ordered[start : index + 1]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(each) for each in run]
        start = index + 1
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {joined(parts)}"


def joined(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "none"


def seconds(value: float) -> str:
    """``31.2 s``, ``0.04 s``, ``20 s``."""
    text = f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"
    return f"{text.removesuffix('.0')} s"


def size(value: int) -> str:
    """``70.0 MiB``."""
    amount, unit = float(value), 0
    while amount >= 1024 and unit + 1 < len(_UNITS):
        amount, unit = amount / 1024, unit + 1
    return f"{value} bytes" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """``1 handle``, ``6 handles``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shortened(text: str, limit: int = 160) -> str:
    """One line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
