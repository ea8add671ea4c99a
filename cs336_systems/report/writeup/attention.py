"""Plain attention, torch.compile, FlashAttention-2."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...accounting import naive_attention_bytes
from ...bench.case import Row
from ...planner.cards import get_card
from ...planner.working import GIB, Section, Term
from ..attention import PEERS, with_speedups
from ..tables import markdown_table
from ..view import OUTCOMES, Column, latest, table
from ..views import VIEWS
from .claims import Evidence, about, gib, listing, ms, one_setting, p50, percent, span, times
from .problem import Exhibit, Problem, says
from .side_by_side import side_by_side
from .timing import CONTEXT

PLAIN, FLASH = "Attention in PyTorch", "FlashAttention-2"
_OURS = "flash_triton"
_IN_16_BITS = "vectorized_torch"
_COMPILED = {"forward_ms", "backward_ms", "step_ms"}
_MOST = 0.75
_BATCH, _HEAD_SIZE = 8, 16  # of the handout: its batch, and the smallest head
_LAUNCHED = 8192  # tokens from which on times of kernels in bf16 are the GPU's and not the host's, which launches them
_LONG = 4096  # from here on scores are larger than a GPU's cache


def is_eager(row: Row) -> bool:
    """Whether a row is of attention that was not compiled."""
    return not row.config.get("compile")


def attention_times(e: Evidence) -> str | None:
    """Times of the smallest and the largest setting, and what failed."""
    rows = [row for row in e.ok("attention", "forward_ms", "backward_ms") if is_eager(row)]
    if not rows:
        return None
    first, last = min(rows, key=lambda r: p50(r, "forward")), max(rows, key=lambda r: p50(r, "forward"))
    text = (
        f"Forward and backward take {ms(p50(first, 'forward'))} and {ms(p50(first, 'backward'))} at "
        f"{about(first, 'head_size', 'length')}, {ms(p50(last, 'forward'))} and {ms(p50(last, 'backward'))} at "
        f"{about(last, 'head_size', 'length')}"
    )
    failed = [row for row in e.all("attention") if is_eager(row) and row.status == "oom"]
    if not failed:
        return (
            f"{text}; none of the {len(rows)} settings runs out of memory on this machine. By count, {_too_long():,} "
            "is the shortest power of two that does on an H200; it is accounted for below."
        )
    least = min(failed, key=lambda row: (row.config["length"], row.config["head_size"]))
    return f"{text}; the first setting that is {OUTCOMES['oom']} is {about(least, 'head_size', 'length')}."


def attention_memory(e: Evidence) -> str | None:
    """How the memory that is saved for the backward pass grows with the length."""
    name = "memory_before_backward_bytes"
    rows = [row for row in e.ok("attention", name, "counted_bytes") if is_eager(row)]
    rows = one_setting(rows, "head_size")
    by_length = {row.config["length"]: row for row in rows}
    longest = max(by_length, default=0)
    half = by_length.get(longest // 2)
    if half is None:
        return None
    row = by_length[longest]
    ratio = row.metrics[name] / half.metrics[name]
    counted = row.metrics["counted_bytes"]["saved_for_backward"]
    if counted < _MOST * row.metrics[name]:  # of short inputs it is other things that take the memory
        return None
    claim = e.claim("it grows with the square of the length", ratio > 3, ratio_when_length_doubles=ratio)
    return (
        f"At {about(row, 'head_size', 'length')}, {gib(row.metrics[name])} are in use before the backward pass, of "
        f"which {gib(counted)} are counted as saved for it ({percent(counted / row.metrics[name])}): {claim}, "
        f"{times(ratio)} as much for twice the tokens. FlashAttention makes that part linear: it works tile by tile, "
        "rescales the softmax as it goes, and recomputes the scores in the backward pass."
    )


def _counted(length: int) -> dict[str, int]:
    return naive_attention_bytes(_BATCH, length, length, _HEAD_SIZE, is_causal=True, on_gpu=True)


def _too_long() -> int:
    """The shortest power of two at which the backward pass alone needs more than an H200 has."""
    limit = get_card("H200").memory_gib * GIB
    return next(2**n for n in itertools.count() if _counted(2**n)["backward_peak"] > limit)


def attention_working() -> list[Section]:
    """Memory of plain attention at the shortest length, a power of two, that an H200 does not hold, term by term."""
    batch, length = _BATCH, _too_long()
    formulas = {
        "scores": f"S = 4 B N^2 = 4 x {batch} x {length}^2",
        "masked_scores": "S",
        "softmax": "S",
        "masks": f"2 M = 2 x {length}^2",
        "saved_for_backward": "S + M + 4 B D (N + 2 N): the softmax's output, a mask, q / sqrt(D), k, v",
        "forward_peak": "2 S + 2 M + 4 B D N",
        "backward_peak": "4 S + M + 4 B D (N + N) on a GPU",
    }
    terms = tuple(Term(name.replace("_", " "), formulas[name], size) for name, size in _counted(length).items())
    title = f"Plain attention, float32, causal, batch {batch}, length {length}, head size {_HEAD_SIZE}"
    note = f"an H200 has {get_card('H200').memory_gib:g} GiB"
    return [Section(title, terms, (note,))]


def compiled_attention(e: Evidence) -> str | None:
    """What torch.compile makes of plain attention."""
    rows = with_speedups(e.all("attention"), "forward_ms", "forward_speedup", "compile", False)
    rows = with_speedups(rows, "backward_ms", "backward_speedup", "compile", False)
    rows = [r for r in rows if r.config.get("compile") and "forward_speedup" in r.metrics]
    long = [row for row in rows if row.config["length"] >= _LONG]
    if not long:
        return None
    speed = {way: [row.metrics[f"{way}_speedup"] for row in long] for way in ("forward", "backward")}
    slower = sum(row.metrics["forward_speedup"] < 1 for row in rows)
    peaks = []
    for row in long:
        same = {name: row.config[name] for name in ("length", "head_size")}
        eager = e.ok("attention", "peak_memory_bytes", compile=False, **same)
        peaks += [row.metrics["peak_memory_bytes"] / r.metrics["peak_memory_bytes"] for r in eager[-1:]]
    memory = f" and {span(peaks, percent)} of the peak memory" if peaks else ""
    return (
        f"(a) From {_LONG:,} tokens on compiled attention is {span(speed['forward'], times)} as fast forward and "
        f"{span(speed['backward'], times)} backward, because what lies between the two products is fused into fewer "
        f"kernels{memory and f', with{memory[4:]}'}; in {slower} of all {len(rows)} settings its forward pass is "
        "slower than the eager one."
    )


def compiled_models(rows: Sequence[Row]) -> list[Row]:
    """The rows of compiled models with plain attention that have an eager one of equal setting, with speed-ups."""
    found = [row for row in latest(rows, VIEWS["model"].keys) if row.status == "ok" and set(row.metrics) >= _COMPILED]
    found = [row for row in found if row.config["attention"] == "naive"]
    for name in _COMPILED:
        found = with_speedups(found, name, name.replace("_ms", "_speedup"), "compile", False)
    return [row for row in found if row.config.get("compile") and "step_speedup" in row.metrics]


def compiled_table(rows: Sequence[Row]) -> str:
    """A line a setting: forward pass and step of the eager model beside those of the compiled one."""
    names = ("forward", "backward", "step")
    header = ["size", "context length", "precision"]
    header += [f"{name}, {way} (ms)" for name in names for way in ("eager", "compiled")] + ["step (x eager)"]
    lines = []
    for row in compiled_models(rows):
        times = [(p50(row, name) * row.metrics[f"{name}_speedup"], p50(row, name)) for name in names]
        lines.append([
            *(str(row.config[field]) for field in ("size", "context_length", "precision")),
            *(f"{each:.2f}" for pair in times for each in pair),
            f"{row.metrics['step_speedup']:.2f}",
        ])  # fmt: skip
    return markdown_table(header, lines, left=3) if lines else ""


def compiled_model(e: Evidence) -> str | None:
    """(b) What torch.compile makes of the whole model."""
    rows = compiled_models(e.all("model"))
    if not rows:
        return None
    best = max(rows, key=lambda row: row.metrics["step_speedup"])
    ahead = [span((row.metrics[f"{name}_speedup"] for row in rows), times) for name in ("forward", "step")]
    return (
        f"(b) Compiled, the model's forward pass is {ahead[0]} as fast and a step with backward pass and optimizer "
        f"{ahead[1]}, most of all for {about(best)}. Each block is compiled by itself, as are the last norm and the "
        "loss, so that all blocks share one compilation; the optimizer is not compiled."
    )


def against_naive(way: str, word: str, is_whole: bool = True) -> Callable[[Evidence], str | None]:
    """The sentence on how fast our kernel's pass is beside that of plain attention, by type, at the longest inputs.

    is_whole: whether it tells where it is slower too.
    """

    def say(e: Evidence) -> str | None:
        rows = with_speedups(e.ok("flash", f"{way}_ms"), f"{way}_ms", "speedup", "kernel", "naive")
        found = []
        for dtype in dict.fromkeys(row.config["dtype"] for row in rows):
            own = [
                r for r in rows if r.config["kernel"] == _OURS and r.config["dtype"] == dtype and "speedup" in r.metrics
            ]
            if own:
                longest = max(row.config["length"] for row in own)
                ratios = [row.metrics["speedup"] for row in own if row.config["length"] == longest]
                found.append(f"{span(ratios, times)} as fast in {dtype} ({longest:,} tokens)")
        if not found:
            return None
        text = f"Against plain attention at its longest inputs, `{_OURS}` {word} is {listing(found)}."
        return f"{text}{_against_16_bits(e, way)}{_where_slower(rows) if is_whole else ''}"

    return say


def _against_16_bits(e: Evidence, way: str) -> str:
    """That plain attention computes in float32 whatever it is given, with the ratio to the one that does not."""
    rows = with_speedups(e.ok("flash", f"{way}_ms", dtype="bf16"), f"{way}_ms", "speedup", "kernel", _IN_16_BITS)
    own = [row for row in rows if row.config["kernel"] == _OURS and "speedup" in row.metrics]
    if not own:
        return ""
    longest = max(row.config["length"] for row in own)
    ratios = [row.metrics["speedup"] for row in own if row.config["length"] == longest]
    return (
        f" Plain attention computes in float32 even for bf16 inputs; against `{_IN_16_BITS}`, which does not, it is "
        f"{span(ratios, times)} as fast ({longest:,} tokens)."
    )


def _where_slower(rows: Sequence[Row]) -> str:
    """Where our kernel is slower than plain attention, by type, over all lengths; "" where it nowhere is."""
    ours = [row for row in rows if row.config["kernel"] == _OURS and "speedup" in row.metrics]
    parts = []
    for dtype in dict.fromkeys(row.config["dtype"] for row in ours):
        own = [row for row in ours if row.config["dtype"] == dtype]
        if slower := [row for row in own if row.metrics["speedup"] < 1]:
            worst = min(slower, key=lambda row: row.metrics["speedup"])
            lengths = span((row.config["length"] for row in slower), lambda n: f"{n:,}")
            parts.append(
                f"in {len(slower)} of {len(own)} settings in {dtype}, of {lengths} tokens, at worst "
                f"{times(worst.metrics['speedup'])} as fast ({about(worst, 'head_size', 'length')})"
            )
    return f" Over all lengths it is slower {listing(parts)}." if parts else " It is slower at none of the lengths."


def backward_variants(e: Evidence) -> str:
    """Which backward passes there are."""
    return (
        "Beside the forward pass in Triton there are two: `compiled_backward`, PyTorch under torch.compile as the "
        'handout asks for, is taken with `flash_triton(..., backward="compiled")`, and by default it is Triton too.'
    )


def best_and_worst(e: Evidence) -> str | None:
    """Our kernel beside the best of PyTorch's, by type, over all lengths."""
    rows = with_speedups(e.ok("flash", "forward_backward_ms"), "forward_backward_ms", "over", "kernel", *PEERS)
    ours = [row for row in rows if row.config["kernel"] == _OURS and "over" in row.metrics]
    if not ours:
        return None
    parts = []
    for dtype in dict.fromkeys(row.config["dtype"] for row in ours):
        own = [row for row in ours if row.config["dtype"] == dtype]
        peers = {row.config["kernel"] for row in rows if row.config["kernel"] in PEERS and row.config["dtype"] == dtype}
        among = f" (only `{next(iter(peers))}` takes it)" if len(peers) == 1 else ""
        long = [row for row in own if row.config["length"] >= _LAUNCHED]
        part = _ahead(long, f" from {_LAUNCHED:,} tokens on") if 0 < len(long) < len(own) else _ahead(own, "")
        least = min(row.metrics["over"] for row in own)
        of_all = sum(row.metrics["over"] > 1 for row in own)
        rest = f", and in {of_all} of all {len(own)}, at worst {times(least)}" if 0 < len(long) < len(own) else ""
        parts.append(f"in {dtype}{among} {part}{rest}")
    return (
        f"`{_OURS}` is ahead of the fastest of PyTorch's own kernels {'; '.join(parts)}. Shorter inputs largely "
        "measure how fast the host launches kernels."
    )


def _ahead(rows: Sequence[Row], which: str) -> str:
    worst = min(rows, key=lambda row: row.metrics["over"])
    return (
        f"in {sum(row.metrics['over'] > 1 for row in rows)} of {len(rows)} settings{which}, at worst "
        f"{times(worst.metrics['over'])} as fast ({about(worst, 'head_size', 'length')})"
    )


def how_timed(e: Evidence) -> str:
    """By what kernels are timed."""
    return "Times are medians, taken as `triton.testing.do_bench` does; the kernels of a setting take turns."


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
    """The table of our kernel beside plain attention, with the ratios to that and to the best of PyTorch's."""
    view = VIEWS["flash"]
    derived = view.derive([row for row in latest(rows, view.keys) if row.config["kernel"] in ("naive", _OURS, *PEERS)])
    return side_by_side(
        derived, view.keys, "kernel", {"naive": "naive", _OURS: _OURS},
        _columns("flash", "forward (ms)", "backward (ms)", "both (ms)"),
        _columns("flash", "forward (x naive)", "backward (x naive)", "both (x naive)", "both (x best peer)"),
    )  # fmt: skip


def eager_alone(rows: Sequence[Row]) -> str:
    """The table of plain attention that is not compiled, without what compares it with itself."""
    view = VIEWS["attention"]
    columns = tuple(column for column in view.columns if not column.where.endswith("_speedup"))
    return table(latest(rows, view.keys), replace(view, columns=columns))


def eager_beside_compiled(rows: Sequence[Row]) -> str:
    """The table of plain attention as it is and compiled."""
    view = VIEWS["attention"]
    derived = view.derive(latest(rows, view.keys))
    settings = {(row.config["head_size"], row.config["length"]) for row in derived if row.config.get("compile")}
    both = [row for row in derived if (row.config["head_size"], row.config["length"]) in settings]
    return side_by_side(
        both, view.keys, "compile", {False: "eager", True: "compiled"},
        _columns("attention", "forward (ms)", "backward (ms)", "peak (GiB)"),
        _columns("attention", "forward (x eager)", "backward (x eager)"),
    )  # fmt: skip


def _columns(case: str, *names: str) -> list[Column]:
    """Columns of a case's view, by name."""
    by_name = {column.name: column for column in VIEWS[case].columns}
    return [by_name[name] for name in names]


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
        name="pytorch_attention",
        section=PLAIN,
        places=("1.2.1", "4.1.1"),
        question=(
            "How do time and memory of plain attention grow with length and head size, and where does memory run out?"
        ),
        exhibits=(
            Exhibit(
                case="attention",
                command="bench attention --compile false",
                also=("bench attention --compile false --length 32768 65536",),
                keep=is_eager,
                show=eager_alone,
                plots=("forward", "memory"),
            ),
        ),
        sentences=(says(attention_times, "attention"), says(attention_memory, "attention")),
        working=attention_working,
        code=("cs336_systems/accounting.py", "cs336_systems/bench/cases/attention.py"),
    ),
    Problem(
        name="torch_compile",
        section=PLAIN,
        places=("1.3", "4.2"),
        question="What does torch.compile gain, for attention alone and for the whole model?",
        exhibits=(
            Exhibit(case="attention", command="bench attention", show=eager_beside_compiled, plots=("backward",)),
            Exhibit(
                case="model",
                command=(
                    f"bench model --size small medium large xl 2.7B --context_length {CONTEXT} --mode train_step "
                    "--precision bf16 --compile false true"
                ),
                keep=lambda row: row.config.get("attention", "naive") == "naive" and row.config["mode"] == "train_step",
                is_asked=lambda row: bool(row.config.get("compile")) and row.config["context_length"] == CONTEXT,
                show=compiled_table,
                together=True,
            ),
        ),
        sentences=(says(compiled_attention, "attention"), says(compiled_model, "model")),
        code=("cs336_systems/training/build.py",),
    ),
    Problem(
        name="flash_forward",
        section=FLASH,
        places=("1.3.2", "4.2.2"),
        question="FlashAttention-2's forward pass, tile by tile in PyTorch and as a Triton kernel, with a causal mask.",
        sentences=(says(against_naive("forward", "forward"), "flash"),),
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
        code=("cs336_systems/bench/cases/leaderboard_2025.py",),
    ),
)
