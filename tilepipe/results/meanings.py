"""What the parts of a launch, the terms of a breakdown and the contenders are, a sentence each.

Knows nothing of columns and of how anything is measured.
"""

__all__ = ["COMPONENTS", "CONTENDERS", "TERMS"]

COMPONENTS = {
    "e2e": (
        "one launch from behind the barrier to this rank's last result, plan included; executor "
        "cuda: by CUDA events, from the launch gate's start to the kernel's end on the device, or, "
        "with regime chained, the period from launch to launch"
    ),
    "plan": "the part of that launch which makes the plan and exchanges counts",
    "stage": (
        "what computes in one launch, from the moment its ranks are ready, gate and plan behind "
        "them, to the rank's last tile or token; of a whole launch: slowest e2e minus slowest plan"
    ),
}
TERMS = {
    "e2e": "the fused launch, plan included; the sum of the others",
    "plan": "exchanging counts, passing the launch gate, making the Plan",
    "gemm_all": "the GEMM alone, no flags, no communication",
    "sm_tax": "what giving SMs to communication costs; null on the host, which has none",
    "sync_tax": "what looking at flags costs the GEMM: all set beforehand, nothing is waited for",
    "publish_tax": "what raising flags that nobody reads costs the GEMM",
    "contention": "what communication into a spare buffer beside it costs that GEMM",
    "late": "the rest: rows that came late",
    "tail": "the rest: from the last tile to the last reduced token",
    "dispatch_gemm": "of a layer: dispatch -> GEMM fused, its product as it is",
    "swiglu": "of a layer: SwiGLU as a pass of its own",
    "gemm_combine": "of a layer: GEMM -> combine fused",
    "joined": "the rest: a whole layer against those three, so a pass that it does without",
}
CONTENDERS = {
    "fused": "communication and GEMM at once, meeting at flags",
    "sequential": "the same parts one after the other, nothing overlaps",
    "dispatch": "dispatch alone: every row sent, all rows here",
    "combine": "combine alone: rows pushed home and reduced as they complete",
    "push": "rows pushed home and all of them here, nothing reduced",
    "reduce": "the reduction alone, all rows home beforehand; on a GPU on all of its SMs",
    "gemm_all": "the GEMM alone, no flags, no communication",
    "gemm_split": "the GEMM alone on the SMs that communication leaves it",
    "gemm_flags": "the GEMM looking at flags that are all set beforehand, on a GPU on those SMs",
    "dispatch_gemm": "of a layer: dispatch -> GEMM fused, its product as it is",
    "swiglu": "of a layer: SwiGLU as a pass of its own over that product",
    "gemm_combine": "of a layer: GEMM -> combine fused, on rows that SwiGLU has made",
    "unsynced": "the fused launch, its GEMM looking at no flags: a bound, its result is wrong",
    "gemm_publish": "the GEMM raising flags that nobody reads",
    "gemm_contended": "the GEMM of the two above while communication runs into a spare buffer",
    "blas_per_expert": "one BLAS product an expert, no tiles",
    "torch_dispatch": (
        "dispatch by torch: gathered, exchanged by all_to_all_single (host: gloo; fabric nvshmem: "
        "NCCL; ranks in one process: nothing to exchange), gathered by expert"
    ),
    "torch_combine": "combine by torch: the same way back, then one weighted sum over slots",
    "torch_sequential": "torch's dispatch or combine, its grouped GEMM behind or before it",
    "torch_layer": "a whole layer by torch: dispatch, grouped_mm, SwiGLU, grouped_mm, combine",
    "torch_grouped_mm": "torch._grouped_mm on the same rows without gaps",
    "quack": "QuACK's grouped GEMM, tuned, on the same rows without gaps",
    "cublas_dense": "one product of all rows with one expert's weight: another result",
}
