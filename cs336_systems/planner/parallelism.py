"""Feed-forward layers on many devices: memory, and when matrix products hide communication.

The handout's problem communication_accounting (2025), by the rules of Austin et al. 2025, "How to Scale Your Model",
part 5, "How to parallelize a Transformer for training". The letters are theirs: B tokens in a batch over all devices;
D = d_model; F = d_ff; N = X Y devices in a mesh, X for (fully sharded) data parallelism on M_X axes of the torus, Y for
tensor parallelism on M_Y axes; C operations/s per device; W_ici bytes/s per axis, in both directions. Numbers are
bfloat16 (2 bytes) in computation and in transfer.
"""

import math
from dataclasses import dataclass

from ..config.checks import check_types, require, require_at_least
from .working import Section, Term, show

GPU_GB, DEVICE_GB = 80, 95
"""Memory of a GPU in the handout's part (a) and of a device in part (b), in 10^9 bytes."""


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """A model of blocks with two linear layers each, d_model -> d_ff -> d_model; the handout's XXL."""

    d_model: int = 16384
    """Width of the residual stream."""
    d_ff: int = 53248
    """Width of the feed-forward layer."""
    num_blocks: int = 126
    """Number of blocks."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "d_model", "d_ff", "num_blocks")

    @property
    def parameters(self) -> int:
        """2 D F per block."""
        return 2 * self.d_model * self.d_ff * self.num_blocks

    @property
    def state_bytes(self) -> int:
        """Master weights, accumulated gradients, two moments of AdamW, all float32: 16 bytes per parameter."""
        return 16 * self.parameters

    @property
    def activation_bytes(self) -> int:
        """Bytes saved for backward per token, in bfloat16: the input of each layer, 2 (D + F) per block."""
        return 2 * (self.d_model + self.d_ff) * self.num_blocks


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices and their links; the defaults are the handout's TPU v5p and its mesh."""

    x: int = 16
    """Devices along the FSDP dimension."""
    y: int = 4
    """Devices along the tensor-parallel dimension."""
    m_x: int = 2
    """Axes of the torus for X."""
    m_y: int = 1
    """Axes of the torus for Y."""
    w_ici: float = 2 * 9e10
    """Bytes/s per axis, in both directions."""
    flops: float = 4.6e14
    """Operations/s per device."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "x", "y", "m_x", "m_y")
        for name in ("w_ici", "flops"):
            require(1 <= getattr(self, name) < 1e30, name, getattr(self, name), "at least 1 and below 1e30")

    @property
    def devices(self) -> int:
        """N = X Y."""
        return self.x * self.y

    @property
    def intensity(self) -> float:
        """alpha = C / W_ici: operations that a device does while one byte is sent over an axis."""
        return self.flops / self.w_ici


def device_bytes(model: FeedForward, tokens: int, n_fsdp: int) -> float:
    """(16 P + A / 2) / N_FSDP + A / 2: A is the activations of a device's tokens, and half of them are sharded."""
    half = tokens * model.activation_bytes / 2
    return (model.state_bytes + half) / n_fsdp + half


def devices_needed(model: FeedForward, tokens: int, limit: float) -> int | None:
    """The least N_FSDP for which a device needs less than `limit` bytes: N > (16 P + A/2) / (limit - A/2).

    None if the unsharded half of the activations exceeds the limit.
    """
    half = tokens * model.activation_bytes / 2
    if half >= limit:
        return None
    return math.floor((model.state_bytes + half) / (limit - half)) + 1


def forward_seconds(model: FeedForward, mesh: Mesh, batch: float) -> tuple[float, float, float]:
    """A block's forward pass with B tokens over all devices: T_math, T_FSDP and T_TP in s.

    T_math = 4 B D F / (N C): two products of 2 B D F operations. T_FSDP = 4 D F / (Y W_ici M_X): both weights, 2 D F
    bytes each, divided by Y, are gathered over X. T_TP = 4 B D / (X W_ici M_Y): the input is gathered over Y before the
    first product and the output reduce-scattered after the second, 2 B D bytes each, divided by X. A gather of V bytes
    takes V / (W_ici M) for any number of devices.
    """
    d, f = model.d_model, model.d_ff
    math_s = 4 * batch * d * f / (mesh.devices * mesh.flops)
    fsdp_s = 4 * d * f / (mesh.y * mesh.w_ici * mesh.m_x) if mesh.x > 1 else 0.0
    tensor_s = 4 * batch * d / (mesh.x * mesh.w_ici * mesh.m_y) if mesh.y > 1 else 0.0
    return math_s, fsdp_s, tensor_s


def least_device_batch(model: FeedForward, mesh: Mesh) -> float:
    """The least B / N at which the forward pass is bound by its products; infinite if it never is.

    Gathers over X and over Y run at once, so T_math >= max(T_FSDP, T_TP). With alpha = C / W_ici, the first means
    B / N >= alpha / (Y M_X), the second F >= alpha Y / M_Y for any B.
    """
    if mesh.y > 1 and mesh.intensity * mesh.y / (model.d_ff * mesh.m_y) > 1:
        return math.inf
    return mesh.intensity / (mesh.y * mesh.m_x) if mesh.x > 1 else 0.0


def best_split(model: FeedForward, mesh: Mesh, batch: float) -> float:
    """The X at which T_FSDP = T_TP, for N devices: sqrt(B N M_X / (F M_Y)). There the larger of the two is least."""
    return math.sqrt(batch * mesh.devices * mesh.m_x / (model.d_ff * mesh.m_y))


def parallelism_sections(model: FeedForward, mesh: Mesh) -> list[Section]:
    """The handout's parts (a), (b) and (c). GB are 10^9 bytes."""
    p, a = model.parameters, model.activation_bytes
    gpus = 16 * p / GPU_GB / 1e9
    sizes = f"2 x {model.d_model} x {model.d_ff} x {model.num_blocks}"
    terms = [
        Term("parameters P", f"2 D F x {model.num_blocks} = {sizes}", p, ""),
        Term("state, float32", f"(4 + 4 + 8) P = {16 * p / 1e9:,.1f} GB", 16 * p),
        Term("GPUs for the state", f"16 P / {GPU_GB} GB = {gpus:.2f}", math.ceil(gpus), ""),
        Term("saved for backward, a token", f"2 (D + F) x {model.num_blocks} = {a:,}, bfloat16", a),
        Term("bfloat16 weights", f"2 P = {2 * p / 1e9:,.1f} GB, if they stay whole for backward", 2 * p),
    ]
    memory = Section("(a) One device", tuple(terms))
    sharded = []
    for tokens in (0, 1024, 2048, 4096, 8192):
        needed, half = devices_needed(model, tokens, DEVICE_GB * 1e9), tokens * a / 2
        working = f"(16 P + A/2) / ({DEVICE_GB} GB - A/2), A/2 = {half / 1e9:.1f} GB"
        if needed is not None:
            working += f"; {device_bytes(model, tokens, needed) / 1e9:.1f} GB a device"
        sharded.append(Term(f"{tokens} tokens a device", working, math.nan if needed is None else needed, ""))
    formula = "a device: (16 P + A / 2) / N_FSDP + A / 2, A = tokens a device x 2 (D + F) blocks"
    section = Section(f"(b) Least N_FSDP below {DEVICE_GB} GB", tuple(sharded), (formula,))
    return [memory, section, _compute_bound_section(model, mesh)]


def _compute_bound_section(model: FeedForward, mesh: Mesh) -> Section:
    """The batch from which the forward pass is bound by its products, and the limit if there is none."""
    alpha, n = mesh.intensity, mesh.devices
    least = least_device_batch(model, mesh)
    tensor = alpha * mesh.y / (model.d_ff * mesh.m_y) if mesh.y > 1 else 0.0
    share = f"alpha Y / (F M_Y) = {alpha:.1f} x {mesh.y} / ({model.d_ff} x {mesh.m_y})"
    gather = f"alpha / (Y M_X) = {alpha:.1f} / ({mesh.y} x {mesh.m_x})" if mesh.x > 1 else "X = 1: nothing is gathered"
    of_all, too_long = f"x N = {mesh.x} x {mesh.y} = {n}", f"for any B, T_TP is {tensor:.3f} T_math"
    terms = [
        Term("alpha", f"C / W_ici = {mesh.flops:g} / {mesh.w_ici:g}", alpha, "operations a byte"),
        Term("T_TP / T_math", share if mesh.y > 1 else "Y = 1: nothing is sent along it", tensor, ""),
        Term("B / N, overlapped", gather if math.isfinite(least) else too_long, least, "tokens"),
        Term("B, overlapped", of_all if math.isfinite(least) else too_long, least * n, "tokens"),
    ]
    if tensor > 1:
        most = model.d_ff * mesh.m_y / alpha
        limit = f"tensor parallelism, as T_TP exceeds T_math for any B; Y may be at most F M_Y / alpha = {most:.1f}"
    elif mesh.x > 1:
        limit = "FSDP, whose gathers take the same time for any B, so B must be large enough"
    elif mesh.y > 1:
        limit = "none, as weights are not gathered, and T_TP is shorter than T_math for any B"
    else:
        limit = "none, as one device sends nothing"
    notes = [
        "overlapped: transfers along X and along Y run at once, so that the longer counts",
        f"limit: {limit}",
    ]
    if 0 < least < math.inf:
        math_s, fsdp_s, tensor_s = (show(t, "s") for t in forward_seconds(model, mesh, least * n))
        notes.append(f"at B, overlapped, a block takes: T_math {math_s}, T_FSDP {fsdp_s}, T_TP {tensor_s}")
        notes.append(f"for that B the best X is {best_split(model, mesh, least * n):.1f}")
    return Section("(c) Batch from which products bound the forward pass", tuple(terms), tuple(notes))
