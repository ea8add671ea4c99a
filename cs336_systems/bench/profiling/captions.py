"""Memory in words: sizes, headings, and what the numbers count."""

from ..row import Row


def size_text(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(num_bytes) >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def title_of(row: Row) -> str:
    """A heading that says what a row is of."""
    config = row.config
    if "snapshot" in config:
        return f"Memory of {config['snapshot']}"
    what = [f"{config.get('size')}, {config.get('batch_size')} x {config.get('context_length')} tokens"]
    what += [str(config.get(name)) for name in ("mode", "precision", "attention")]
    what += ["compiled"] * bool(config.get("compile"))
    if config.get("activation_checkpointing", "none") != "none":
        what.append(f"checkpointed by {config['activation_checkpointing']}")
    return f"Memory of {', '.join(what)}"


def note_of(row: Row) -> str:
    """A note on what the numbers count."""
    counts = {
        "allocator": "Counted: what the GPU's allocator was asked for, without its rounding. Times are the host's, "
        "which asks for memory before the GPU comes to use it.",
        "storages": "Counted: the storages of tensors that operators returned, on a CPU; what an operator uses inside "
        "is not seen.",
        "unknown": "Counted: what the snapshot says was asked for.",
    }
    categories = {
        "tensors": "Parameters, optimizer state and gradients are known by their addresses; activations are what the "
        "forward pass has allocated and the backward pass begins with; other is what else was there before.",
        "lifetimes": "There is no phases.json beside this snapshot: categories are lifetimes within the recording, and "
        "nothing more is known.",
    }
    return f"{counts[row.metrics['counts']]} {categories[row.metrics['categories_from']]}"
