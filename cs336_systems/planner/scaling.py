"""A gated feed-forward layer over many devices: how many can it use before communication takes longer than products?

The calculations of the 2026 handout (section 8), with its letters: B tokens in a batch, D = d_model, F = d_ff, C
operations/s per device, W bytes/s that a device sends. The layer is y = (f(x W1) * x W2) W3, with 2 bytes per number.
Elementwise work is not counted, transfers are rings, and computation overlaps with them.
"""

from dataclasses import dataclass
from typing import Literal

from ..config.checks import check_types, require, require_at_least
from .communication import ring_seconds
from .working import Section, Term, show

Direction = Literal["forward", "backward"]
_PRODUCTS = {"forward": 3, "backward": 6}  # of 2 B D F operations: each has two gradients
_OPERATIONS = {"forward": "6 B D F / N", "backward": "12 B D F / N"}
_PASSES: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer, its batch, and the devices; the defaults describe the 8B model and an H100 with NVLink."""

    batch: int = 65536
    """B, tokens in the batch over all devices."""
    d_model: int = 4096
    """D, width of the residual stream."""
    d_ff: int = 11008
    """F, width of the feed-forward layer."""
    flops: float = 989e12
    """C, operations/s per device."""
    egress: float = 4.5e11
    """W, bytes/s that a device sends."""
    n_fsdp: int = 4
    """Devices along the FSDP axis; data parallelism or FSDP alone uses the devices of both axes."""
    n_tp: int = 2
    """Devices along the tensor-parallel axis; tensor parallelism alone uses the devices of both axes."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "batch", "d_model", "d_ff", "n_fsdp", "n_tp")
        for name in ("flops", "egress"):
            require(1 <= getattr(self, name) < 1e30, name, getattr(self, name), "at least 1 and below 1e30")

    @property
    def devices(self) -> int:
        """N = N_FSDP N_TP."""
        return self.n_fsdp * self.n_tp

    @property
    def weight_bytes(self) -> int:
        """Bytes of W1, W2 and W3: 6 D F."""
        return 6 * self.d_model * self.d_ff


def device_flops(layer: Layer, direction: Direction, devices: int) -> float:
    """6 B D F / N forward, 12 B D F / N backward, for any division of the layer: nothing is computed twice."""
    return _PRODUCTS[direction] * 2 * layer.batch * layer.d_model * layer.d_ff / devices


def data_parallel_seconds(layer: Layer, devices: int) -> float:
    """Backward: an all-reduce of the weights' gradients, 2 (N - 1) / N 6 D F / W. Forward sends nothing."""
    return ring_seconds("all-reduce", layer.weight_bytes, devices, 0, layer.egress)


def fsdp_seconds(layer: Layer, direction: Direction, n_fsdp: int, n_tp: int = 1) -> float:
    """(N - 1) / N 6 D F / (N_TP W) to gather the weights; backward twice that, to reduce-scatter gradients as well."""
    weights = layer.weight_bytes / n_tp
    gather = ring_seconds("all-gather", weights, n_fsdp, 0, layer.egress)
    return gather + (ring_seconds("reduce-scatter", weights, n_fsdp, 0, layer.egress) if direction == "backward" else 0)


def tensor_parallel_seconds(layer: Layer, n_tp: int, n_fsdp: int = 1) -> float:
    """An all-reduce of the 2 B D bytes of y, or backward of dx: 2 (N - 1) / N 2 B D / (N_FSDP W)."""
    return ring_seconds("all-reduce", 2 * layer.batch * layer.d_model / n_fsdp, n_tp, 0, layer.egress)


def fsdp_intensity(layer: Layer) -> float:
    """p = B W / C: the time of computing with a layer's weights, relative to sending them."""
    return layer.batch * layer.egress / layer.flops


def tensor_intensity(layer: Layer) -> float:
    """q = 3 F W / (2 C): the same for the activations that tensor parallelism sends in the forward pass."""
    return 1.5 * layer.d_ff * layer.egress / layer.flops


def most_fsdp(layer: Layer) -> float:
    """The most devices of data parallelism, and of FSDP in either direction: N <= 1 + B W / C.

    From 6 B D F / (N C) >= (N - 1) / N 6 D F / W; in the backward pass both sides double.
    """
    return 1 + fsdp_intensity(layer)


def most_tensor_parallel(layer: Layer, direction: Direction) -> float:
    """The most devices of tensor parallelism: forward N <= 1 + 3 F W / (2 C), backward N <= 1 + 3 F W / C.

    From 6 B D F / (N C) >= 4 (N - 1) / N B D / W; the left side doubles in the backward pass.
    """
    return 1 + _PRODUCTS[direction] / _PRODUCTS["forward"] * tensor_intensity(layer)


def most_of_both(layer: Layer, together: bool) -> tuple[float, float]:
    """N_FSDP and N_TP of the most devices on which the forward pass is bound by its products.

    With p = B W / C and q = 3 F W / (2 C), multiplying the times by N C / (6 B D F) leaves (N_FSDP - 1) / p <= 1 and
    (N_TP - 1) / q <= 1 if transfers along both axes run at the same time: N = (1 + p) (1 + q). If they take turns, the
    sum of the two must be at most 1, and N is largest (Lagrange) at N_FSDP / p = N_TP / q = (1 + 1/p + 1/q) / 2:
    N = p q (1 + 1/p + 1/q)^2 / 4, about a quarter. If that leaves an axis less than one device, it has one.
    """
    p, q = fsdp_intensity(layer), tensor_intensity(layer)
    if together:
        return 1 + p, 1 + q
    n_fsdp, n_tp = (p + 1 + p / q) / 2, (q + 1 + q / p) / 2
    if min(n_fsdp, n_tp) < 1:
        return (1 + p, 1.0) if p > q else (1.0, 1 + q)
    return n_fsdp, n_tp


def data_parallel_section(layer: Layer) -> Section:
    """The handout's data_parallel_calcs."""
    n = layer.devices
    sent_s = data_parallel_seconds(layer, n)
    terms = [
        *_products(layer, "backward", "12 B D F / N: six products of 2 B D F, each device for its share of the batch"),
        Term("backward, communication", "2 (N - 1) / N 6 D F / W: all gradients all-reduced", sent_s, "s"),
        Term("at most", "N <= 1 + B W / C", most_fsdp(layer), "devices"),
    ]
    return Section(f"Data parallel over N = {n}", tuple(terms), (_verdict(layer, "backward", sent_s),))


def fsdp_section(layer: Layer) -> Section:
    """The handout's fsdp_calcs."""
    n = layer.devices
    why = {"forward": "(N - 1) / N 6 D F / W: weights gathered",
           "backward": "2 (N - 1) / N 6 D F / W: weights gathered, gradients reduce-scattered"}  # fmt: skip
    terms, notes = [], []
    for each in _PASSES:
        sent_s = fsdp_seconds(layer, each, n)
        terms += _products(layer, each, f"{_OPERATIONS[each]}, as in data parallelism")
        terms.append(Term(f"{each}, communication", why[each], sent_s, "s"))
        notes.append(_verdict(layer, each, sent_s))
    terms.append(Term("at most, in both", "N <= 1 + B W / C", most_fsdp(layer), "devices"))
    return Section(f"FSDP over N = {n}", tuple(terms), tuple(notes))


def tensor_parallel_section(layer: Layer) -> Section:
    """The handout's tp_calcs, without the equations of (a), which the write-up has."""
    n = layer.devices
    terms, verdicts = [], []
    by_pass = {"forward": ("y", "3 F W / (2 C)"), "backward": ("dx", "3 F W / C")}
    for each in _PASSES:
        sent, bound = by_pass[each]
        seconds, most = tensor_parallel_seconds(layer, n), most_tensor_parallel(layer, each)
        terms += _products(layer, each, f"{_OPERATIONS[each]}: a share of the columns or rows of each product")
        terms.append(Term(f"{each}, communication", f"2 (N - 1) / N 2 B D / W: {sent} all-reduced", seconds, "s"))
        terms.append(Term(f"{each}, at most", f"N <= 1 + {bound}, for any B", most, "devices"))
        verdicts.append(_verdict(layer, each, seconds))
    return Section(f"Tensor parallel over N = {n}", tuple(terms), tuple(verdicts))


def both_section(layer: Layer) -> Section:
    """The handout's fsdp_tp_calcs, forward."""
    p, q = fsdp_intensity(layer), tensor_intensity(layer)
    fsdp = fsdp_seconds(layer, "forward", layer.n_fsdp, layer.n_tp)
    tensor = tensor_parallel_seconds(layer, layer.n_tp, layer.n_fsdp)
    terms = [
        *_products(layer, "forward", "6 B D F / N"),
        Term("FSDP axis", "(N_FSDP - 1) / N_FSDP 6 D F / (N_TP W)", fsdp, "s"),
        Term("TP axis", "2 (N_TP - 1) / N_TP 2 B D / (N_FSDP W)", tensor, "s"),
        Term("communication", "the longer of both, which run at once", max(fsdp, tensor), "s"),
        Term("p", "B W / C", p, ""),
        Term("q", "3 F W / (2 C)", q, ""),
    ]
    for together, name in ((True, "at most, overlapped"), (False, "at most, in turns")):
        n_fsdp, n_tp = most_of_both(layer, together)
        formula = "N <= (1 + p) (1 + q)" if together else "N <= p q (1 + 1/p + 1/q)^2 / 4"
        if not together and min(n_fsdp, n_tp) == 1:  # two axes are no gain
            formula = "N <= 1 + q" if n_fsdp == 1 else "N <= 1 + p"
        at = f"N_FSDP = {n_fsdp:,.1f}, N_TP = {n_tp:,.1f}"
        terms.append(Term(name, f"{formula}, at {at}", n_fsdp * n_tp, "devices"))
    notes = (
        f"overlapped: {_verdict(layer, 'forward', max(fsdp, tensor))}",
        f"in turns: {_verdict(layer, 'forward', fsdp + tensor)}",
    )
    return Section(f"FSDP over {layer.n_fsdp} and tensor parallel over {layer.n_tp}, forward", tuple(terms), notes)


def scaling_sections(layer: Layer) -> list[Section]:
    """All sections; the first all-reduces the weights' gradients, as usual and as in alternate_ring_all_reduce."""
    working = {
        "all-reduce": "2 (N - 1) / N S / W: a reduce-scatter and an all-gather, each N - 1 steps of S / N bytes",
        "alternate all-reduce": "(N - 1) S / W: N - 1 steps, each sends a whole tensor; N / 2 times as long",
    }
    nbytes, n = layer.weight_bytes, layer.devices
    rings = [Term(kind, how, ring_seconds(kind, nbytes, n, 0, layer.egress), "s") for kind, how in working.items()]
    ring = Section(f"An all-reduce of S = {nbytes:,.0f} bytes over N = {n}", tuple(rings))
    parts = (data_parallel_section, fsdp_section, tensor_parallel_section, both_section)
    return [ring, *(part(layer) for part in parts)]


def _products(layer: Layer, direction: Direction, working: str) -> list[Term]:
    """The operations of a pass, and the time they take."""
    flops = device_flops(layer, direction, layer.devices)
    by_rate = f"operations / C = {show(flops, 'FLOP')} / {show(layer.flops, 'FLOP/s')}"
    return [
        Term(f"{direction}, operations", working, flops, "FLOP"),
        Term(f"{direction}, computing", by_rate, flops / layer.flops, "s"),
    ]


def _verdict(layer: Layer, direction: Direction, sent_s: float) -> str:
    """Whether the products of a pass over all devices hide sent_s seconds of communication."""
    computing_s = device_flops(layer, direction, layer.devices) / layer.flops
    both = f"{show(sent_s, 's')} of communication beside {show(computing_s, 's')} of computing"
    too_long = sent_s > computing_s * (1 + 1e-9)  # equal up to rounding counts as hidden
    found = f"too long to be hidden, by {show(sent_s - computing_s, 's')}" if too_long else "hidden"
    return f"{direction}, N = {layer.devices}: {both}: {found}"
