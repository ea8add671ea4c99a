"""The model against formulas written here on their own, in float64, or against PyTorch's own layers."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_basics.attention import Documents, scaled_dot_product_attention
from cs336_basics.model import Embedding, Linear, RMSNorm, RotaryEmbedding, TransformerLM

BF16_ROUNDING = 2.0**-8  # the largest relative error of rounding to bfloat16
FP16_ROUNDING = 2.0**-11


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding by complex numbers: the pair (a, b) is a + ib, and is multiplied by exp(i angle)."""
    dim = x.shape[-1]
    frequency = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    angle = positions.double()[:, None] * frequency
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angle)
    return torch.view_as_real(turned).flatten(-2)


def reference_lm(weights: dict[str, Tensor], token_ids: Tensor, *, num_heads: int, theta: float = 10000.0) -> Tensor:
    """The whole model in float64, from its state dict alone: loops over heads and queries, no shared code."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) * weight

    def attend(x: Tensor, at: str) -> Tensor:
        q, k, v = (x @ w[f"{at}.{name}_proj.weight"].T for name in "qkv")
        size, length = x.shape[-1] // num_heads, x.shape[-2]
        heads = []
        for h in range(num_heads):
            part = slice(h * size, (h + 1) * size)
            qh, kh = (rotate(y[..., part], torch.arange(length), theta) for y in (q, k))
            rows = []
            for t in range(length):
                scores = (kh[:, : t + 1] * qh[:, t : t + 1]).sum(-1) / math.sqrt(size)
                weight = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
                rows.append((weight[..., None] * v[:, : t + 1, part]).sum(1))
            heads.append(torch.stack(rows, dim=1))
        return torch.cat(heads, dim=-1) @ w[f"{at}.output_proj.weight"].T

    x = w["token_embeddings.weight"][token_ids]
    num_layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("layers."))
    for i in range(num_layers):
        at = f"layers.{i}"
        x = x + attend(norm(x, w[f"{at}.ln1.weight"]), f"{at}.attn")
        y = norm(x, w[f"{at}.ln2.weight"])
        gate = y @ w[f"{at}.ffn.w1.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (y @ w[f"{at}.ffn.w3.weight"].T)) @ w[f"{at}.ffn.w2.weight"].T
    return norm(x, w["ln_final.weight"]) @ w["lm_head.weight"].T


def small_lm(**changes) -> TransformerLM:
    shape = dict(vocab_size=31, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=40)
    return TransformerLM(**(shape | changes))


def randomize_norms(model: TransformerLM) -> TransformerLM:
    """Norm weights start at 1, which would hide a norm that is left out or in the wrong place."""
    for name, p in model.named_parameters():
        if p.ndim == 1:
            with torch.no_grad():
                p.copy_(torch.empty_like(p).uniform_(0.5, 1.5))
            assert "ln" in name
    return model


# Layers


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 4)])
def test_linear_multiplies_by_its_weight_transposed(leading):
    layer, x = Linear(7, 4).double(), torch.randn(*leading, 7, dtype=torch.float64)
    expected = (x[..., None, :] * layer.weight).sum(-1)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_embedding_takes_the_row_of_each_token():
    layer = Embedding(11, 6)
    ids = torch.tensor([[0, 10, 3], [3, 3, 7]])
    one_hot = F.one_hot(ids, 11).float()
    assert torch.equal(layer(ids), one_hot @ layer.weight)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm_equals_torch(scale, eps):
    layer = RMSNorm(48, eps=eps)
    torch.nn.init.uniform_(layer.weight, -2, 2)
    x = scale * torch.randn(3, 5, 48)
    expected = F.rms_norm(x.double(), (48,), layer.weight.double(), eps)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "dtype, rounding, scale", [(torch.bfloat16, BF16_ROUNDING, 1.0), (torch.float16, FP16_ROUNDING, 3000.0)]
)
def test_rms_norm_computes_in_float32_and_returns_the_dtype_of_x(dtype, rounding, scale):
    layer = RMSNorm(1024)
    torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    x = (scale * torch.randn(8, 1024)).to(dtype)  # float16: the squares alone would overflow
    truth = F.rms_norm(x.double(), (1024,), layer.weight.double(), 1e-5)
    result = layer(x)
    assert result.dtype == dtype
    # One rounding at the end is all the error there is.
    assert ((result.double() - truth).abs() <= 1.01 * rounding * truth.abs() + 1e-6).all()


# Rotary positions


@pytest.mark.parametrize("theta", [100.0, 10000.0])
@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_rope_turns_interleaved_pairs_as_complex_numbers(theta, leading):
    x = torch.randn(*leading, 40, 10)
    result = RotaryEmbedding(64, 10, theta)(x)
    torch.testing.assert_close(result.double(), rotate(x, torch.arange(40), theta), rtol=1e-5, atol=2e-6)


def test_rope_at_position_one_turns_the_first_pair_by_one_radian():
    x = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    result = RotaryEmbedding(2, 4, theta=100.0)(x, start=1)
    expected = [math.cos(1), math.sin(1), -math.sin(0.1), math.cos(0.1)]
    torch.testing.assert_close(result, torch.tensor([expected]))


def test_rope_is_exact_at_far_positions():
    x = torch.randn(1, 8)
    result = RotaryEmbedding(100_001, 8)(x, start=100_000)
    torch.testing.assert_close(result.double(), rotate(x, torch.tensor([100_000]), 1e4), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("start", [0, 1, 7])
def test_rope_with_a_start_equals_the_end_of_the_whole(start):
    rope, x = RotaryEmbedding(10, 4), torch.randn(2, 10, 4)
    assert torch.equal(rope(x[:, start:], start), rope(x)[:, start:])


def test_rope_of_bfloat16_computes_in_float32():
    x = torch.randn(50, 8).bfloat16()
    truth = rotate(x, torch.arange(50), 1e4)
    result = RotaryEmbedding(50, 8)(x)
    assert result.dtype == torch.bfloat16
    assert ((result.double() - truth).abs() <= 1.01 * BF16_ROUNDING * truth.abs() + 1e-6).all()


# Attention

LEADING = [(), (3,), (2, 3), (2, 1, 3)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (7, 7), (1, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_attention_equals_torch(is_causal, n_q, n_k, leading, dtype, tolerance):
    q, k, v = (torch.randn(*leading, n, 8, dtype=dtype) for n in (n_q, n_k, n_k))
    result = scaled_dot_product_attention(q, k, v, is_causal)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(),
        F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_attention_of_large_magnitudes_equals_torch_and_is_finite(scale, is_causal):
    q, k = (scale * torch.randn(2, 6, 16) for _ in range(2))
    v = torch.randn(2, 6, 16)
    result = scaled_dot_product_attention(q, k, v, is_causal)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    assert result.isfinite().all()
    torch.testing.assert_close(result.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_gradients_equal_torch(is_causal):
    inputs = [torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    d_o = torch.randn(2, 5, 4, dtype=torch.float64)
    ours = torch.autograd.grad(scaled_dot_product_attention(*inputs, is_causal), inputs, d_o)
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=is_causal), inputs, d_o)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, BF16_ROUNDING), (torch.float16, FP16_ROUNDING)])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_attention_of_low_precision_inputs_is_computed_in_float32(dtype, rounding, scale):
    q, k, v = (torch.randn(2, 16, 32).mul(s).to(dtype) for s in (scale, scale, 1.0))
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    result = scaled_dot_product_attention(q, k, v, True)
    assert result.dtype == dtype
    assert ((result.double() - truth).abs() <= 1.01 * rounding * truth.abs() + 2e-5).all()


def test_attention_is_computed_in_float32_under_autocast_too():
    """This is how a run with precision bf16 calls it; "float32 whatever the inputs are" is the contract."""
    q, k, v = (torch.randn(2, 16, 32).mul(s).bfloat16() for s in (8.0, 8.0, 1.0))
    expected = scaled_dot_product_attention(q, k, v, True)
    with torch.autocast("cpu", torch.bfloat16):
        result = scaled_dot_product_attention(q, k, v, True)
    torch.testing.assert_close(result, expected, rtol=2 * BF16_ROUNDING, atol=1e-4)


def test_a_window_and_documents_hide_keys() -> None:
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(3))
    numbers = torch.tensor([[5, 5, 5, 1, 1, 5, 5], [0, 1, 1, 1, 1, 1, 1]])
    o = scaled_dot_product_attention(q, k, v, True, window=3, documents=Documents.from_numbers(numbers))
    for b, i in itertools.product(range(2), range(7)):
        first = i
        while first > max(0, i - 2) and numbers[b, first - 1] == numbers[b, i]:
            first -= 1
        seen = slice(first, i + 1)
        weights = (k[b, :, seen] @ q[b, :, i, :, None] / 2).softmax(dim=1)
        torch.testing.assert_close(o[b, :, i], (weights * v[b, :, seen]).sum(1))


def test_documents_are_ranges_of_positions() -> None:
    starts, ends = Documents.from_tokens(torch.tensor([[7, 2, 0, 0, 5, 5], [1, 1, 1, 1, 1, 0]]), end_of_text=0)
    assert starts.tolist() == [[0, 0, 2, 3, 3, 3], [0, 0, 0, 0, 0, 5]]
    assert ends.tolist() == [[2, 2, 3, 6, 6, 6], [5, 5, 5, 5, 5, 6]]
    assert starts.dtype == ends.dtype == torch.int32


def test_documents_with_a_cache_are_refused() -> None:
    model, tokens = TransformerLM(11, 16, d_model=8, num_layers=1, num_heads=2, d_ff=16), torch.zeros(1, 4).long()
    with pytest.raises(ValueError, match="documents are given with a cache"):
        model(tokens, model.new_cache(), documents=Documents.from_tokens(tokens, 0))


def test_losses_of_packed_documents_are_those_of_the_documents_alone() -> None:
    model = small_lm().double()
    lengths = (1, 7, 3, 5)
    tokens = torch.randint(31, (1, sum(lengths)))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packed = model(tokens, documents=Documents.from_numbers(numbers))
    alone = torch.cat([model(document) for document in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone)
    assert not torch.allclose(model(tokens), alone)


# Initialisation

# Var of a normal distribution cut at 3 sigma: 1 - 2 * 3 * phi(3) / (2 * Phi(3) - 1).
CUT_STD = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


@pytest.mark.parametrize(
    "weight, sigma",
    [
        (lambda: Linear(512, 256).weight, math.sqrt(2 / 768)),
        (lambda: Linear(100, 1500).weight, math.sqrt(2 / 1600)),
        (lambda: Embedding(1000, 150).weight, 1.0),
    ],
    ids=["linear", "wide linear", "embedding"],
)
def test_initial_weights_are_normal_and_cut_at_three_sigma(weight, sigma):
    w = weight().detach().double().flatten() / sigma
    error = 1 / math.sqrt(w.numel())
    assert abs(w.mean()) < 5 * error
    assert w.std() == pytest.approx(CUT_STD, abs=5 * error)
    assert 2.9 < w.abs().max() <= 3 + 1e-6
    # 68.27% of a normal lie within one sigma; cut at three they are 0.27% more of the rest.
    assert (w.abs() < 1).double().mean() == pytest.approx(0.6827 / 0.9973, abs=5 * error)


def test_every_matrix_of_a_model_has_its_own_initial_values_and_norms_are_one():
    model = small_lm(num_heads=2)
    assert all((p == 1).all() for p in model.parameters() if p.ndim == 1)
    matrices = [p.detach().flatten()[:8] for p in model.parameters() if p.ndim == 2]
    assert len(matrices) == 2 + 2 * 7
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(matrices, 2))


# The model

BLOCK_SHAPES = {
    "attn.q_proj.weight": (24, 24),
    "attn.k_proj.weight": (24, 24),
    "attn.v_proj.weight": (24, 24),
    "attn.output_proj.weight": (24, 24),
    "ln1.weight": (24,),
    "ln2.weight": (24,),
    "ffn.w1.weight": (40, 24),
    "ffn.w2.weight": (24, 40),
    "ffn.w3.weight": (40, 24),
}


def test_the_state_dict_has_exactly_these_names_and_shapes():
    expected = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in BLOCK_SHAPES.items()}
    expected |= {"token_embeddings.weight": (31, 24), "ln_final.weight": (24,), "lm_head.weight": (31, 24)}
    assert {name: tuple(t.shape) for name, t in small_lm().state_dict().items()} == expected


@pytest.mark.parametrize("num_heads", [1, 3, 12])
@pytest.mark.parametrize("theta", [10000.0, 50.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-6)], ids=str)
def test_the_model_equals_an_independent_reimplementation_in_float64(num_heads, theta, dtype, tolerance):
    model = randomize_norms(small_lm(num_heads=num_heads, rope_theta=theta)).to(dtype)
    token_ids = torch.randint(31, (3, 16))
    expected = reference_lm(model.state_dict(), token_ids, num_heads=num_heads, theta=theta)
    # In float64 the table of angles is float32 all the same.
    torch.testing.assert_close(model(token_ids).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("changed", [0, 1, 8, 15])
def test_a_token_changes_nothing_before_it_and_everything_from_it_on(changed):
    model = small_lm()
    token_ids = torch.randint(31, (2, 16))
    other = token_ids.clone()
    other[:, changed] = (other[:, changed] + 1) % 31
    before, after = model(token_ids), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(dim=-1).all()


def test_the_attention_passed_in_is_called_once_a_layer_with_the_contract():
    calls = []

    def attention(q, k, v, is_causal):
        calls.append((q.shape, k.shape, v.shape, is_causal))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    model = small_lm(attention=attention)
    plain = small_lm()
    plain.load_state_dict(model.state_dict())
    token_ids = torch.randint(31, (2, 10))
    torch.testing.assert_close(model(token_ids), plain(token_ids), rtol=1e-5, atol=1e-5)
    assert calls == [((2, 3, 10, 8),) * 3 + (True,)] * 2


def test_the_model_uses_the_attention_passed_in():
    model = small_lm(attention=lambda q, k, v, is_causal: torch.zeros_like(q))
    weights = model.state_dict()
    silent = {name: t.zero_() if "v_proj" in name else t for name, t in ((n, t.clone()) for n, t in weights.items())}
    token_ids = torch.randint(31, (2, 10))
    torch.testing.assert_close(
        model(token_ids).double(), reference_lm(silent, token_ids, num_heads=3), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("first", [1, 5, 16])
def test_logits_with_a_cache_equal_those_of_the_whole(first):
    model, token_ids = small_lm(), torch.randint(31, (2, 16))
    cache = model.new_cache()
    parts = [model(token_ids[:, :first], cache)]
    parts += [model(token_ids[:, t : t + 1], cache) for t in range(first, 16)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(token_ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2])
def test_a_window_is_the_same_with_a_cache(every: int) -> None:
    model = TransformerLM(31, 16, 24, 3, 3, 36, window=3, window_every=every).double()
    tokens = torch.randint(31, (2, 9))
    whole, cache = model(tokens), model.new_cache()
    parts = [model(tokens[:, :5], cache), *(model(token, cache) for token in tokens[:, 5:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    model.layers[0].attn.window = None
    assert not torch.allclose(model(tokens), whole)
    assert [layer.attn.window for layer in model.layers[1:]] == ([3, 3] if every == 1 else [None, 3])


# Errors


@pytest.mark.parametrize(
    "d_model, num_heads, message",
    [
        (9, 3, "dim is 3: rotary embedding turns pairs, so it must be even"),
        (10, 4, "d_model is 10: it must be divisible by num_heads, which is 4"),
    ],
)
def test_a_width_that_does_not_divide_into_even_heads_is_refused(d_model, num_heads, message):
    with pytest.raises(ValueError, match=message):
        small_lm(d_model=d_model, num_heads=num_heads)


@pytest.mark.parametrize("cached, given", [(0, 17), (16, 1)])
def test_positions_beyond_the_context_are_refused(cached, given):
    model = small_lm()
    cache = model.new_cache()
    if cached:
        model(torch.zeros(1, cached, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="position 16 is beyond the context_length of 16"):
        model(torch.zeros(1, given, dtype=torch.long), cache)


def test_a_second_chunk_of_several_positions_on_a_cache_is_refused():
    model = small_lm()
    cache = model.new_cache()
    model(torch.zeros(1, 4, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="2 positions on a cache of 4"):
        model(torch.zeros(1, 2, dtype=torch.long), cache)
