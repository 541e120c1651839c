"""Folders that look like the `proc` and `sys` of a host."""


def made_file(root, name, text):
    """Write one file below the root of a host."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def made_host(root, available_bytes):
    """Write the memory that a machine has left."""
    made_file(root, "proc/meminfo", f"MemTotal: 5 kB\nMemAvailable: {available_bytes >> 10} kB\n")
