"""Texts about memory: sizes, titles, and notes on the way of counting."""

from ..row import Row


def size_text(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(num_bytes) >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def title_of(row: Row) -> str:
    """A heading that names the snapshot or the workload of a row."""
    config = row.config
    if "snapshot" in config:
        return f"Memory of {config['snapshot']}"
    words = [f"{config.get('size')}, {config.get('batch_size')} x {config.get('context_length')} tokens"]
    words += [str(config.get(name)) for name in ("mode", "precision", "attention")]
    words += ["compiled"] * bool(config.get("compile"))
    if config.get("activation_checkpointing", "none") != "none":
        words.append(f"checkpointed by {config['activation_checkpointing']}")
    return f"Memory of {', '.join(words)}"


def note_of(row: Row) -> str:
    """A note on the way of counting and of finding categories."""
    counts = {
        "allocator": "Counted: requests to the GPU's allocator, without its rounding. Times are the host's, which "
        "requests memory before the GPU uses it.",
        "storages": "Counted: the storages of tensors that operators returned, on a CPU, without temporaries inside an "
        "operator.",
        "unknown": "Counted: the requested sizes in the snapshot.",
    }
    categories = {
        "tensors": "Parameters, optimizer state and gradients are known by their addresses; activations are allocated "
        "by the forward pass and alive when the backward pass begins; other was there before.",
        "lifetimes": "There is no phases.json beside this snapshot, so categories are lifetimes within the recording.",
    }
    return f"{counts[row.metrics['counts']]} {categories[row.metrics['categories_from']]}"
