"""What the kernel notes of memory."""

from pathlib import Path


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that has an address, as proc(5) names them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise LookupError(address)
