"""What the tests read in the machine code of Hopper's kernels."""

import re


def unset_registers(listing: str) -> list[str]:
    """The instructions in nvdisasm's listing that read a uniform register which some way to them has not written.

    ptxas 12.8, which comes with Triton 3.6, makes such code where a loop may be left out: it computes a descriptor on
    the way into the first of two loops that read it.
    """
    kernels = re.split(r"^\s*\.section\s+\.text", listing, flags=re.MULTILINE)
    return [instruction for kernel in kernels for instruction in _unset_in(kernel)]


def _unset_in(kernel: str) -> list[str]:
    labels: dict[str, int] = {}
    code: list[tuple[str, list[str], bool]] = []  # opcode, operands, whether it may be left out
    for line in kernel.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+ )?(\S+)(.*?) *;", line):
            operands = [x.strip() for x in re.split(r",(?![^\[]*\])", found[3])]
            code.append((found[2], operands, bool(found[1]) or "UP" in operands[0]))
    known: list[set[str] | None] = [None] * len(code)  # None: no way to it was followed yet
    unset: dict[int, bool] = {}
    ways = [0] if code else []
    while ways:
        at = ways.pop()
        opcode, operands, may_pass = code[at]
        before = known[at] or set()
        result = re.fullmatch(r"UR(\d+)", operands[0])
        read = set(re.findall(r"\bUR\d+", " ".join(operands[1:] if result else operands)))
        if descriptors := re.search(
            r"gdesc\[UR(\d+)\]", " ".join(operands)
        ):  # two; a left operand in registers has none
            first = int(descriptors[1])
            read = {f"UR{first + i}" for i in ((0, 1, 2, 3) if operands[1].startswith("gdesc") else (2, 3))}
        unset[at] = not before >= read
        # Whether an instruction with a predicate has run is not followed.
        is_wide = re.search(r"WIDE|\.64|LDC", opcode) is not None
        after = before | ({f"UR{int(result[1]) + i}" for i in range(1 + is_wide)} if result else set())
        leaves = opcode.startswith(("BRA", "BRX", "CALL"))
        follow = [labels[x] for x in re.findall(r"\.L_x_\d+", " ".join(operands)) if x in labels] if leaves else []
        if may_pass or opcode not in ("BRA", "BRX", "EXIT"):
            follow.append(at + 1)
        for to in follow:
            there = after if known[to] is None else after & known[to]
            if there != known[to]:
                known[to] = there
                ways.append(to)
    return [" ".join([code[at][0], ", ".join(code[at][1])]) for at, is_unset in sorted(unset.items()) if is_unset]
