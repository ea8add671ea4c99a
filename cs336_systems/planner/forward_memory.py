"""Memory of a forward pass without gradients, as in inference: the peak is the most that is alive at once.

Counted by following the lines of `cs336_basics.model` and `nn_utils.cross_entropy`: a tensor is alive as long as a
variable or an argument of a running call refers to it. Measured peaks of float32 models equal this to the byte.
"""

from .accounting import naive_attention_bytes
from .job import Job
from .memory import WORKSPACE, constant_terms, copy_terms
from .working import Term


def forward_moments(job: Job) -> dict[str, list[Term]]:
    """The memory in use at three moments of an eager forward pass with naive attention, without gradients.

    T = B N_ctx tokens, c bytes per number (4 in float32, 2 under autocast), S = 4 B H N_ctx^2 a matrix of scores:

        attention  of the last block, at the product of softmax and v: scores and softmax 2 S, a mask N_ctx^2; the
                   block's input, the output of ln1, the product's copy of v, and the product, all in float32 16 T d;
                   q, k, v 3 c T d; under autocast v in float32 4 T d more. Before this moment there is a second mask,
                   N_ctx^2, but less of the rest as long as N_ctx < 8 B d
        ffn        of the last block, at the product of silu(w1 x) and w3 x: both factors and the product 3 c T d_ff;
                   the block's input, its sum with the output of attention, and the output of ln2 12 T d
        loss       logits c T V, under autocast in float32 4 T V more, logsumexp's exponentials 4 T V; the chosen
                   logit, the maximum and the sum of each token 12 T

    Autocast keeps a copy of each weight that it has cast. At the moment of attention, the last block's output
    projection and feed-forward layer have none yet, 2 (d^2 + 3 d d_ff); at the moment of ffn, w2 has none, 2 d d_ff;
    the head's copy, 2 V d, comes last. Only the calling thread computes, so there is one cuBLAS workspace.

    Raises ValueError for a compiled model and for another attention, whose memory is not known.
    """
    if job.compile or job.attention != "naive":
        how = f"{'compiled' if job.compile else 'eager'} blocks with attention {job.attention}"
        raise ValueError(f"no prediction for a forward pass alone of {how}")
    for name in ("num_kv_heads", "head_dim", "qk_norm"):
        if value := getattr(job.shape, name):
            raise ValueError(f"no prediction for a forward pass alone with {name} {value}")
    s, t, c = job.shape, job.tokens, job.number_bytes
    length, d = s.context_length, s.d_model
    wide = 0 if c == 4 else 4
    constant = [term for term in constant_terms(job) if term.name != "workspace"]
    constant.append(Term("workspace", "of cuBLAS, 32 MiB for the one thread that computes", WORKSPACE))
    counted = naive_attention_bytes(job.batch_size * s.num_heads, length, length, s.head_size, is_causal=True)
    scores, mask = counted["scores"], counted["masks"] // 2
    copies, streams, per_logit = copy_terms(job)[0], 16 + wide + 3 * c, c + wide + 4
    not_yet_cast = {"attention": d * d + 3 * d * s.d_ff + s.vocab_size * d, "ffn": d * s.d_ff + s.vocab_size * d}
    alive = {
        "attention": Term(
            "attention",
            f"2 S + N_ctx^2 + {streams} T d = 2 x {scores:,} + {mask:,} + {streams} x {t * d:,}",
            2 * scores + mask + streams * t * d,
        ),
        "ffn": Term(
            "feed-forward layer",
            f"12 T d + {3 * c} T d_ff = 12 x {t * d:,} + {3 * c} x {t * s.d_ff:,}",
            12 * t * d + 3 * c * t * s.d_ff,
        ),
        "loss": Term(
            "logits and loss",
            f"{per_logit} T V + 12 T = {per_logit} x {t * s.vocab_size:,} + 12 x {t:,}",
            per_logit * t * s.vocab_size + 12 * t,
        ),
    }
    found = {}
    for moment, term in alive.items():
        missing = 2 * not_yet_cast.get(moment, 0) if copies.value else 0
        working = f"{copies.working}, less {missing:,} to come" if missing else copies.working
        found[moment] = [*constant, Term("weight copies", working, copies.value - missing), term]
    return found


def forward_peak_bytes(job: Job) -> float:
    """The peak memory of a forward pass without gradients."""
    return max(sum(term.value for term in terms) for terms in forward_moments(job).values())
