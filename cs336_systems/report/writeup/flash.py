"""FlashAttention-2 beside plain attention and PyTorch's kernels, and the leaderboard of 2025."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...bench.row import Row
from ...planner.rows import card_of, is_of_cpu
from ..attention_tables import PEERS, fastest, with_speedups
from ..selection import latest
from ..spec import Column
from ..views import VIEWS, columns_of
from .claims import Evidence, about, listing, p50, percent, span, times
from .problem import Exhibit, Problem, says
from .side_by_side import side_by_side

FLASH = "FlashAttention-2"
_OURS = "flash_triton"
_IN_16_BITS = "vectorized_torch"
_WAITING = 1.1  # times each pass alone, added up: both passes in one call that take longer wait for the host
_BEST_PEER = "best_peer"


def against_naive(way: str, word: str, is_whole: bool = True) -> Callable[[Evidence], str | None]:
    """The sentence on how fast our kernel's pass is beside that of plain attention, by type, at the longest inputs.

    is_whole: whether it tells where it is slower too.
    """

    def say(e: Evidence) -> str | None:
        ours = _ours_beside(e, way, "naive")
        if not ours:
            return None
        found = [f"{_at_the_longest(own)[0]} in {dtype} {_at_the_longest(own)[1]}" for dtype, own in ours.items()]
        text = f"Against plain attention at its longest inputs, `{_OURS}` {word} is {listing(found)}."
        if half := _ours_beside(e, way, _IN_16_BITS).get("bf16"):
            text += (
                f" Plain attention computes in float32 even for bf16 inputs; against `{_IN_16_BITS}`, which does not, "
                f"it is {' '.join(_at_the_longest(half))}."
            )
        return text + (_where_slower(ours) if is_whole else "")

    return say


def _ours_beside(e: Evidence, way: str, *others: str) -> dict[str, list[Row]]:
    """By type, the rows of our kernel with their speed-up over the fastest of other kernels at the same setting."""
    rows = with_speedups(e.ok("flash", f"{way}_ms"), f"{way}_ms", "speedup", "kernel", *others)
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.config["kernel"] == _OURS and "speedup" in row.metrics:
            found.setdefault(row.config["dtype"], []).append(row)
    return found


def _at_the_longest(rows: Sequence[Row]) -> tuple[str, str]:
    """How many times as fast, at which length."""
    longest = max(row.config["length"] for row in rows)
    ratios = [row.metrics["speedup"] for row in rows if row.config["length"] == longest]
    return f"{span(ratios, times)} as fast", f"({longest:,} tokens)"


def _where_slower(ours: Mapping[str, Sequence[Row]]) -> str:
    """Where our kernel is slower than plain attention, by type, over all lengths."""
    parts = []
    for dtype, own in ours.items():
        if slower := [row for row in own if row.metrics["speedup"] < 1]:
            lengths = span((row.config["length"] for row in slower), lambda n: f"{n:,}")
            parts.append(
                f"in {len(slower)} of {len(own)} settings in {dtype}, of {lengths} tokens, {_at_worst(slower)}"
            )
    return f" Over all lengths it is slower {listing(parts)}." if parts else " It is slower at none of the lengths."


def _at_worst(rows: Sequence[Row]) -> str:
    worst = min(rows, key=lambda row: row.metrics["speedup"])
    return f"at worst {times(worst.metrics['speedup'])} as fast ({about(worst, 'head_size', 'length')})"


def backward_variants(e: Evidence) -> str:
    """Which backward passes there are."""
    return (
        "Beside the forward pass in Triton there are two: `compiled_backward`, PyTorch under torch.compile as the "
        "handout asks for, in the kernel `flash_triton_compiled`, and Triton's own in `flash_triton`."
    )


def best_and_worst(e: Evidence) -> str | None:
    """Our kernel beside the best of PyTorch's, by type, where times are the GPU's, and over all settings."""
    ours = _ours_beside(e, "forward_backward", *PEERS)
    if not ours:
        return None
    measured = e.ok("flash", "forward_backward_ms")
    peer_of = fastest(measured, "forward_backward_ms", "kernel", *PEERS)
    by_dtype = {(row.config["dtype"], row.config["kernel"]) for row in measured}
    parts, waiting, overall = [], [], []
    for dtype, own in ours.items():
        peers = [kernel for kernel in PEERS if (dtype, kernel) in by_dtype]
        among = f" (only `{peers[0]}` takes it)" if len(peers) == 1 else ""
        found = [row for row in own if not any(_waits(each) for each in (row, peer_of(row)) if each)]
        waiting += [row for row in own if row not in found]
        parts += [f"in {dtype}{among} {_ahead(found)} settings, {_at_worst(found)}"] if found else []
        overall.append(f"{_ahead(own)} in {dtype}, at worst {times(min(row.metrics['speedup'] for row in own))}")
    text = f"`{_OURS}` is ahead of the fastest of PyTorch's own kernels"
    if not waiting:
        return f"{text} {'; '.join(parts)}."
    lengths = span((row.config["length"] for row in waiting), lambda n: f"{n:,}")
    why = (
        f"both passes in one call of either kernel take over {_WAITING} times as long as each alone, added up: the GPU "
        "waits for the host, which launches kernels"
    )
    if not parts:
        return f"{text} {', and '.join(overall)}, but in all of them {why}."
    return (
        f"{text} {'; '.join(parts)}. This leaves out {len(waiting)}, of {lengths} tokens, in which {why}; with those "
        f"it is ahead {', and '.join(overall)}."
    )


def _waits(row: Row) -> bool:
    """Whether both passes in one call take longer than their kernels do, so that the GPU waits for the host."""
    if is_of_cpu(row) or not {"forward_ms", "backward_ms"} <= set(row.metrics):
        return False
    return p50(row, "forward_backward") > _WAITING * (p50(row, "forward") + p50(row, "backward"))


def _ahead(rows: Sequence[Row]) -> str:
    return f"in {sum(row.metrics['speedup'] > 1 for row in rows)} of {len(rows)}"


def how_float32_is_multiplied(e: Evidence) -> str | None:
    """With which products our kernel computes in fp32, so that its rate is not taken for that of TF32."""
    rate = "forward_tflops"
    rows = [row for row in e.ok("flash", rate, kernel=_OURS, dtype="fp32") if not is_of_cpu(row)]
    if not rows:
        return None
    most = max(rows, key=lambda row: row.metrics[rate])
    card = card_of(most)
    beside = ""
    if card is not None and most.metrics[rate] * 1e12 > card.matmul_fp32:
        beside = (
            f"; so its forward pass reaches {most.metrics[rate]:.3g} TFLOP/s, more than the "
            f"{card.matmul_fp32 / 1e12:.3g} that the planner takes for the card's float32 units"
        )
    return (
        f"In fp32 `{_OURS}` does not use TF32 unless PyTorch is told to allow it: a product is the sum of six of "
        f"bfloat16 parts on the tensor cores (Triton's `bf16x6`), with all of float32's 24 bits{beside}."
    )


def how_timed(e: Evidence) -> str:
    """By what kernels are timed."""
    return "Times are medians, as of `triton.testing.do_bench`; the kernels of a setting take turns."


def out_of_memory(e: Evidence) -> str | None:
    """Which kernels run out of memory, and from which length on."""
    failed: dict[str, list[Row]] = {}
    for row in e.all("flash"):
        if row.status == "oom":
            failed.setdefault(row.config["kernel"], []).append(row)
    if not failed:
        return "No kernel runs out of memory at any of the lengths."
    parts = [f"`{kernel}` from {min(r.config['length'] for r in rows):,} tokens on" for kernel, rows in failed.items()]
    ours = "none" if _OURS not in failed else "some"
    return f"Out of memory: {listing(parts)}; {ours} of `{_OURS}`, whose memory is linear in the length."


def beside_naive(rows: Sequence[Row]) -> str:
    """The table of our kernel beside plain attention and the best of PyTorch's, by type, head size and length."""
    view = VIEWS["flash"]
    derived = view.derive([row for row in latest(rows, view.keys) if row.config["kernel"] in ("naive", _OURS, *PEERS)])
    peer_of = fastest(derived, "forward_backward_ms", "kernel", *PEERS)
    shown = []
    for row in sorted(derived, key=lambda row: [row.config[name] for name in ("dtype", "head_size", "length")]):
        peer = peer_of(row)
        best = {} if peer is None else {_BEST_PEER: {"name": peer.variant, "p50": p50(peer, "forward_backward")}}
        shown.append(replace(row, metrics={**row.metrics, **best}))
    best_peer = (
        Column("best peer", f"{_BEST_PEER}.name", "s"),
        Column("both, best peer (ms)", f"{_BEST_PEER}.p50", ".4g"),
    )
    return side_by_side(
        shown, view.keys, "kernel", {"naive": "naive", _OURS: _OURS},
        columns_of("flash", "forward (ms)", "backward (ms)", "both (ms)"),
        (*columns_of("flash", "forward (x naive)", "backward (x naive)", "both (x naive)"), *best_peer,
         *columns_of("flash", "both (x best peer)")),
    )  # fmt: skip


def leaderboard(e: Evidence) -> str | None:
    """The handout's number, and how far from it PyTorch's kernels are."""
    rows = e.ok("leaderboard-2025", "forward_sum_backward_ms")
    mean = {row.config["kernel"]: row.metrics["forward_sum_backward_ms"]["mean"] for row in rows}
    if _OURS not in mean:
        return None
    peers = {kernel: value for kernel, value in mean.items() if kernel in PEERS}
    text = f"`{_OURS}` takes {mean[_OURS]:.3f} ms, the mean that the handout's timer prints"
    if not peers:
        return f"{text}."
    best = min(peers, key=lambda kernel: peers[kernel])
    ratio = mean[_OURS] / peers[best]
    how = (
        "as long as" if abs(ratio - 1) < 0.005 else f"{percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'} than"
    )
    beaten = [f"`{kernel}`" for kernel, value in peers.items() if value > mean[_OURS]]
    faster = f"; it is faster than {listing(beaten)}" if beaten else ""
    return f"{text}: {how} the fastest of PyTorch's kernels (`{best}`, {peers[best]:.3f} ms){faster}."


_FLASH = "bench flash --kernels naive vectorized_torch flash_torch flash_triton flash_cuda sdpa sdpa_flash sdpa_cudnn"

PROBLEMS = (
    Problem(
        name="flash_forward",
        section=FLASH,
        places=("1.3.2", "4.2.2"),
        question="FlashAttention-2's forward pass, tile by tile in PyTorch and as a Triton kernel, with a causal mask.",
        sentences=(says(against_naive("forward", "forward"), "flash"), says(how_float32_is_multiplied, "flash")),
        code=(
            "cs336_systems/kernels/attention/flash_torch.py",
            "cs336_systems/kernels/attention/flash_triton.py",
            "cs336_systems/kernels/attention/flash_triton_kernels.py",
            "cs336_systems/kernels/attention/flash_gluon_kernels.py",
            "tests/test_attention.py",
        ),
    ),
    Problem(
        name="flash_backward",
        section=FLASH,
        places=("1.3.2", "4.2.2"),
        question="Its backward pass, which makes the scores again from queries, keys and the saved logsumexp.",
        sentences=(says(backward_variants), says(against_naive("backward", "backward"), "flash")),
        code=(
            "cs336_systems/kernels/attention/function.py",
            "cs336_systems/kernels/attention/flash_torch.py",
            "cs336_systems/kernels/attention/flash_triton_kernels.py",
            "cs336_systems/kernels/attention/flash_gluon_backward_kernels.py",
            "tests/test_attention.py",
        ),
    ),
    Problem(
        name="flash_benchmarking",
        section=FLASH,
        places=("1.3.2", "4.2.2"),
        question=(
            "How fast are forward and backward passes over lengths, head sizes and types, beside PyTorch's attention?"
        ),
        exhibits=(Exhibit(case="flash", command=_FLASH, show=beside_naive, plots=("both",)),),
        sentences=(
            says(how_timed, "flash"),
            says(against_naive("forward_backward", "in both passes", is_whole=False), "flash"),
            says(best_and_worst, "flash"),
            says(out_of_memory, "flash"),
        ),
    ),
    Problem(
        name="leaderboard",
        section=FLASH,
        places=("1.3.3", ""),
        question="How long do both passes take with 16 heads, 16,384 tokens and head size 64, causal, in bf16?",
        exhibits=(Exhibit(case="leaderboard-2025", command="bench leaderboard-2025"),),
        sentences=(says(leaderboard, "leaderboard-2025"),),
        code=("cs336_systems/bench/cases/attention.py",),
    ),
)
