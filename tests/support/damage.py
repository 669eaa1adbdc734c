"""Damages files as transport, disks and people do, from a seed."""

import re
import struct

SIZES = (0, 1, 0x7F, 0xFF, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def damaged(raw, rng):
    """Return bytes with a fault or several: cut off, bits flipped, sizes and numbers changed, parts lost or doubled."""
    for _ in range(int(rng.integers(1, 4))):
        at = _place(raw, rng)
        kind = rng.choice(["cut", "flip", "size", "digits", "lose", "double", "fill"])
        if kind == "cut":
            raw = raw[:at]
        elif kind == "flip" and raw:
            raw = raw[:at] + bytes([raw[at] ^ (1 << int(rng.integers(8)))]) + raw[at + 1 :]
        elif kind == "size":
            width, form = ((2, "<H"), (4, "<I"), (8, "<Q"))[int(rng.integers(3))]
            value = SIZES[int(rng.integers(len(SIZES)))] & ((1 << 8 * width) - 1)
            raw = raw[:at] + struct.pack(form, value) + raw[at + width :]
        elif kind == "digits":
            numbers = list(re.finditer(rb"\d+", raw[:5000]))
            if numbers:
                found = numbers[int(rng.integers(len(numbers)))]
                new = rng.choice([b"0", b"-1", b"1e9", b"99999999999", b"9" * 5000, b"x", b"(((", b""])
                raw = raw[: found.start()] + bytes(new) + raw[found.end() :]
        elif kind == "lose":
            raw = raw[:at] + raw[at + int(rng.integers(1, 40)) :]
        elif kind == "double":
            raw = raw[: at + int(rng.integers(1, 40))] + raw[at:]
        else:
            raw = raw[:at] + bytes(rng.integers(0, 256, 16, dtype="uint8")) + raw[at + 16 :]
    return raw


def _place(raw, rng):
    """Return a place, more often than not in the first or the last bytes, where files say what they hold."""
    if not raw:
        return 0
    part = rng.random()
    near = int(rng.integers(min(len(raw), 600)))
    return near if part < 0.4 else len(raw) - 1 - near if part < 0.7 else int(rng.integers(len(raw)))
