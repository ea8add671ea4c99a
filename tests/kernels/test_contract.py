import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_basics.attention import Documents
from cs336_systems.kernels.attention import get_attention
from cs336_systems.kernels.attention.contract import (
    Band,
    as_4d,
    attention_flops,
    band_of,
    check_band,
    check_qkv,
    group_size,
    repeat_heads,
    visible_pairs,
)

LENGTHS = [(0, 0), (0, 5), (5, 0), (1, 1), (7, 7), (7, 3), (3, 7)]


def q_k_v(*shape: int) -> list[torch.Tensor]:
    return [torch.ones(shape) for _ in range(3)]


def test_a_layout_that_autograd_does_not_take_is_named() -> None:
    q, k, v = q_k_v(2, 8, 16)
    with pytest.raises(ValueError, match=r"^v is .*mkldnn: it must be dense$"):
        check_qkv(q, k, v.to_mkldnn(), False)


def test_tensors_of_another_device_are_named() -> None:
    q, k, v = q_k_v(4, 8)
    with pytest.raises(ValueError, match=r"^v is on meta: it must be on q's device, which is cpu"):
        check_qkv(q, k, v.to("meta"), False)


def test_limits_of_a_kernel_are_named() -> None:
    with pytest.raises(ValueError, match=r"^q is torch.float32: it must be one of torch.float16, torch.bfloat16"):
        check_qkv(*q_k_v(4, 8), True, dtypes=(torch.float16, torch.bfloat16))
    with pytest.raises(ValueError, match=r"^q has head size 8: it must be 1 to 4"):
        check_qkv(*q_k_v(4, 8), True, max_head_size=4)


@pytest.mark.parametrize("shape", [(4, 8), (0, 8), (2, 4, 8), (2, 3, 4, 8), (0, 3, 4, 8), (2, 3, 2, 4, 8)])
def test_accepts_inputs_that_keep_the_contract(shape: tuple[int, ...]) -> None:
    check_qkv(*q_k_v(*shape), True, dtypes=(torch.float32,), max_head_size=8)
    q, _, _ = q_k_v(*shape)
    k = v = torch.ones(*shape[:-2], 9, 8)
    check_qkv(q, k, v, False)


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((4, 8), (1, 1, 4, 8)),
        ((2, 4, 8), (1, 2, 4, 8)),
        ((2, 3, 4, 8), (2, 3, 4, 8)),
        ((5, 2, 3, 4, 8), (10, 3, 4, 8)),
        ((2, 5, 2, 3, 4, 8), (20, 3, 4, 8)),
        ((0, 2, 3, 4, 8), (0, 3, 4, 8)),
    ],
)
def test_four_dimensions_are_a_view_of_the_same_numbers(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    assert as_4d(x).shape == expected
    assert as_4d(x).data_ptr() == x.data_ptr()
    assert torch.equal(as_4d(x).flatten(), x.flatten())


@pytest.mark.parametrize("n_q, n_k", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_visible_pairs_equal_the_mask(n_q: int, n_k: int, is_causal: bool) -> None:
    seen = [(i, j) for i in range(n_q) for j in range(n_k) if j <= i or not is_causal]
    assert visible_pairs(n_q, n_k, is_causal) == len(seen)


@pytest.mark.parametrize("window", [1, 3, 7, 20])
def test_a_window_leaves_fewer_pairs(window: int) -> None:
    seen = [(i, j) for i in range(7) for j in range(7) if i - window < j <= i]
    assert visible_pairs(7, 7, True, window) == len(seen)
    assert attention_flops((2, 7, 8), 7, True, products=5, window=window) == 5 * 2 * 8 * 2 * len(seen)


def test_operations_equal_pytorchs_count() -> None:
    q, k, v = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 8)
    with FlopCounterMode(display=False) as counter:
        (q @ k.mT) @ v
    assert attention_flops(q.shape, 7, is_causal=False) == counter.get_total_flops()
    assert attention_flops(q.shape, 7, is_causal=False, products=5) * 2 == counter.get_total_flops() * 5


def test_causal_operations_are_the_share_of_the_visible_pairs() -> None:
    assert attention_flops((2, 3, 4, 8), 4, is_causal=True) == 2 * 2 * 8 * 6 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("heads, group", [((6, 6), 1), ((6, 3), 2), ((6, 2), 3), ((6, 1), 6), ((0, 0), 1)])
def test_key_heads_may_divide_query_heads(heads: tuple[int, int], group: int) -> None:
    q, k = (torch.arange(2 * n * 4).view(2, n, 4, 1).float() for n in heads)
    check_qkv(q, k, k, False)
    check_qkv(q[0], k[0], k[0], False)
    assert group_size(q, k) == group
    repeated, _ = repeat_heads(q, k, k)
    assert repeated.shape == q.shape
    for head in range(heads[0]):
        assert torch.equal(repeated[:, head], k[:, head // group])


def test_a_band_that_does_not_fit_is_named() -> None:
    q = torch.ones(2, 4, 8, 16)
    starts, ends = Documents.from_numbers(torch.zeros(2, 8))
    for is_causal, k, band, message in (
        (False, q, Band(3), "is_causal is False with 8 queries and 8 keys: a window and documents need True"),
        (True, q[:, :, :5], Band(3), "is_causal is True with 8 queries and 5 keys: a window and documents need True"),
        (True, q, Band(0), "window is 0: it must be a whole number of keys, at least 1"),
        (True, q, Band(2.5), "window is 2.5: it must be a whole number of keys, at least 1"),
        (True, q, Band(None, starts[:1], ends[:1]), r"documents.starts is \(1, 8\), torch.int32.*must be \(2, 8\)"),
        (True, q, Band(None, starts, ends.long()), "documents.ends is .*torch.int64, on cpu: .*torch.int32"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            check_band(q, k, is_causal, band)
    check_band(q, q, True, band_of(9, Documents(starts, ends)))
    assert band_of(None, None) is None
    with pytest.raises(ValueError, match=r"^documents is a Tensor: it must be Documents, which"):
        band_of(None, starts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["naive", "vectorized_torch", "flash_torch", "sdpa"])
def test_a_window_as_long_as_the_sequence_hides_nothing(name: str) -> None:
    attention, q = get_attention(name), torch.randn(2, 3, 8, 16)
    assert [check_band(q, q, True, Band(window)) for window in (7, 8, 2**70)] == [7, None, None]
    for window in (8, 2**70):
        assert torch.equal(attention(q, q, q, True, window=window), attention(q, q, q, True))


@pytest.mark.parametrize("name", ["naive", "vectorized_torch", "flash_torch", "flash_cuda", "sdpa"])
def test_tensors_are_checked_before_a_window(name: str) -> None:
    q = torch.ones(2, 3, 8, 16)
    with pytest.raises(ValueError, match=r"^q is a NoneType: it must be a tensor$"):
        get_attention(name)(None, q, q, True, window=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^k is a list: it must be a tensor$"):
        get_attention(name)(q, [], q, True, window=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^q has shape \(16,\): it must be \(\.\.\., length, head size\)$"):
        get_attention(name)(*[q[0, 0, 0]] * 3, True, window=3)


def test_other_numbers_of_heads_are_named() -> None:
    q = torch.ones(2, 8, 4, 8)
    with pytest.raises(ValueError, match=r"^k has 3 heads: they must divide q's, which has 8$"):
        check_qkv(q, q[:, :3], q[:, :3], False)
    with pytest.raises(ValueError, match=r"^k has 0 heads: they must divide q's, which has 8$"):
        check_qkv(q, q[:, :0], q[:, :0], False)
    with pytest.raises(ValueError, match=r"^v has 4 heads: it must have as many as k, which has 2$"):
        check_qkv(q, q[:, :2], q[:, :4], False)
    with pytest.raises(ValueError, match=r"^k has 2 heads: mine needs as many as q has, which are 8$"):
        check_qkv(q, q[:, :2], q[:, :2], False, equal_heads="mine")
    with pytest.raises(ValueError, match=r"^k has shape \(1, 8, 4, 8\): its leading dimensions must be those of q"):
        check_qkv(q, q[:1], q[:1], False)
