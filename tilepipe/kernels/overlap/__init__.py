"""Communication and grouped GEMM in one launch, meeting at words in global memory."""
