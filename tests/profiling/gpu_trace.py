"""A trace as `torch.profiler` exports it on a GPU, made up: two training steps whose every microsecond is known.

Times are in us. Thread 100 is Python's, thread 200 that of the backward pass; stream 7 computes, stream 20 copies.
"""

from typing import Any

HOST, MAIN, BACKWARD = 4711, 100, 200
STEP_US = 10_000.0

SGEMM = (
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_c"
)
SOFTMAX_FORWARD = (
    "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(f)"
)
SOFTMAX_BACKWARD = (
    "void at::native::(anonymous namespace)::softmax_warp_backward<float, float, float, 9, false>(float*)"
)
MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float> > >(int)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>()"
COPY = "Memcpy HtoD (Pinned -> Device)"


class Trace:
    """Events, written down in the profiler's format."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def span(self, category: str, name: str, thread: int, start: float, end: float, **args: Any) -> None:
        """Something that the host did."""
        times = {"ts": start, "dur": end - start}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": HOST, "tid": thread, **times, "args": args}
        )

    def annotation(self, name: str, start: float, end: float, on_gpu: tuple[float, float], thread: int = MAIN) -> None:
        """A range of `record_function`: on the host, and in the profiler's projection onto the GPU."""
        self.span("user_annotation", name, thread, start, end, **{"External id": 1, "Record function id": 0})
        projected = {"ts": on_gpu[0], "dur": on_gpu[1] - on_gpu[0], "pid": 0, "tid": 7, "args": {"External id": 1}}
        self.events.append({"ph": "X", "cat": "gpu_user_annotation", "name": name, **projected})

    def kernel(
        self, name: str, launched: float, ran: tuple[float, float], thread: int = MAIN, stream: int = 7, **how: Any
    ) -> None:
        """A launch and its kernel; `how`: api, category of both, or the correlation of an earlier launch."""
        if "correlation" in how:
            correlation = how["correlation"]
        else:
            self._correlation = correlation = self._correlation + 1
            launch = {"External id": correlation, "cbid": 211, "correlation": correlation}
            api, category = how.get("api", "cudaLaunchKernel"), how.get("launch_category", "cuda_runtime")
            self.span(category, api, thread, launched, launched + 5, **launch)
            flow = {"ph": "s", "id": correlation, "pid": HOST, "tid": thread, "ts": launched}
            self.events.append({**flow, "cat": "ac2g", "name": "ac2g"})
        args = {"External id": correlation, "device": 0, "context": 1, "stream": stream, "correlation": correlation}
        event = {"ph": "X", "cat": how.get("category", "kernel"), "name": name, "pid": 0, "tid": stream}
        self.events.append({**event, "ts": ran[0], "dur": ran[1] - ran[0], "args": args})

    def operator(self, name: str, thread: int, start: float, end: float, sequence: int, link: int) -> None:
        """An operator that autograd knows, with its end of the link from forward (thread MAIN) to backward."""
        args = {"Sequence number": sequence, "Fwd thread id": 0 if thread == MAIN else 1}
        self.span("cpu_op", name, thread, start, end, **args)
        flow = {"ph": "s" if thread == MAIN else "f", "id": link, "pid": HOST, "tid": thread, "ts": start}
        self.events.append({**flow, "cat": "fwdbwd", "name": "fwdbwd"} | ({} if thread == MAIN else {"bp": "e"}))


def training_steps(steps: int = 2) -> list[dict[str, Any]]:
    """The events of some steps, each STEP_US after the one before. A step has:

    forward: a copy (40), a product of a projection (300), scores (200), softmax (100), values (150);
    backward: values (300), softmax (160), scores (400), a projection (500), an elementwise kernel (60);
    optimizer: one kernel (250), one (20) of a graph's launch with it; outside of all, a kernel of 30.
    The host is ahead: most kernels run after the host has left their range, and the copy overlaps the projection.
    """
    trace = Trace()
    trace.events.append({"ph": "M", "name": "process_name", "ts": 0, "pid": HOST, "tid": 0, "args": {"name": "python"}})
    for step in range(steps):
        _training_step(trace, 1000.0 + step * STEP_US, step)
    trace.events.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e6})
    return trace.events


def _training_step(trace: Trace, t: float, step: int) -> None:
    links = [10 * step + i for i in range(1, 5)]
    trace.annotation("forward", t, t + 500, (t + 60, t + 2000))
    trace.kernel(COPY, t + 10, (t + 60, t + 100), stream=20, category="gpu_memcpy", api="cudaMemcpyAsync")
    trace.operator("aten::mm", MAIN, t + 20, t + 60, 1, links[0])
    trace.kernel(SGEMM, t + 30, (t + 70, t + 370))
    trace.annotation("attention scores", t + 100, t + 150, (t + 370, t + 570))
    trace.operator("aten::bmm", MAIN, t + 110, t + 140, 2, links[1])
    trace.kernel(SGEMM, t + 120, (t + 370, t + 570))
    trace.annotation("attention softmax", t + 160, t + 190, (t + 570, t + 670))
    trace.operator("aten::softmax", MAIN, t + 165, t + 188, 3, links[2])
    trace.kernel(SOFTMAX_FORWARD, t + 170, (t + 570, t + 670))
    trace.annotation("attention values", t + 200, t + 250, (t + 670, t + 820))
    trace.operator("aten::bmm", MAIN, t + 205, t + 240, 4, links[3])
    trace.kernel(SGEMM, t + 210, (t + 670, t + 820), api="cuLaunchKernelEx", launch_category="cuda_driver")

    trace.annotation("backward", t + 520, t + 1500, (t + 820, t + 2300))
    names = ("MmBackward0", "BmmBackward0", "SoftmaxBackward0", "BmmBackward0")
    kernels = ((SGEMM, 500), (SGEMM, 400), (SOFTMAX_BACKWARD, 160), (SGEMM, 300))
    started, running = t + 600, t + 820
    for i in (3, 2, 1, 0):
        engine = f"autograd::engine::evaluate_function: {names[i]}"
        trace.span("cpu_op", engine, BACKWARD, started - 5, started + 90, **{"Sequence number": i + 1})
        trace.operator(names[i], BACKWARD, started, started + 80, i + 1, links[i])
        name, time = kernels[i]
        trace.kernel(name, started + 40, (running, running + time), thread=BACKWARD)
        started, running = started + 100, running + time
    trace.kernel(MUL, started + 40, (running, running + 60), thread=BACKWARD)  # a gradient that is added up

    trace.annotation("optimizer", t + 1600, t + 1700, (t + 2300, t + 2600))
    trace.kernel(ADAM, t + 1650, (t + 2300, t + 2550), api="cudaGraphLaunch")
    trace.kernel(MUL, t + 1650, (t + 2550, t + 2570), correlation=trace._correlation)
    trace.kernel(MUL, t + 1800, (t + 2600, t + 2630))


def inference_step() -> list[dict[str, Any]]:
    """A forward pass with one product of 300 in no range of attention, and one kernel whose launch was not recorded."""
    trace = Trace()
    trace.annotation("forward", 0.0, 100.0, (50.0, 400.0))
    trace.kernel(SGEMM, 10.0, (50.0, 350.0))
    trace.kernel(MUL, 0.0, (350.0, 360.0), correlation=999)
    return trace.events
