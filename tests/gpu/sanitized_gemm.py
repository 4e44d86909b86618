"""Small launches of the grouped GEMM, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized_gemm

Also with `--tool initcheck`, `racecheck` and `synccheck`. A sanitizer slows kernels down a
hundredfold, so the waits' limit is a thousand times the usual one.

Racecheck reports the records by which tiles are handed out, and nothing else. It does not see the
order that phases of a barrier give: of `tests.gpu.handshake phases`, the smallest right program
that hands over so, it reports the same. Run that beside as a control; what it says of hand-outs
here is no finding. That order is modelled in tests/kernels/test_gemm_protocol.py.
"""

import sys

from benchmarks.program import need_gpus, run
from tests.gpu.gemms import LIMIT_NS, Case
from tilepipe.config.choices import Granularity, Layout, StoreMode
from tilepipe.kernels.gemm.choices import Clip, Consumers
from tilepipe.kernels.gemm.plan import GemmTuning

ROWS = [0, 1, 129, 64, 257]
PING_PONG = GemmTuning(tile_n=128, consumers=Consumers.ping_pong)
CASES = {
    "cooperative": {"tuning": GemmTuning()},
    "padded": {"tuning": GemmTuning(), "layout": Layout.padded},
    "cluster": {"tuning": GemmTuning(tile_n=128, cluster_m=2)},
    "ping_pong": {"tuning": PING_PONG},
    "direct": {"tuning": GemmTuning(store=StoreMode.direct)},
    "per_group": {"tuning": GemmTuning(clip=Clip.per_group)},
    "hooks": {"tuning": GemmTuning(), "wait": Granularity.tile, "publish": True},
    "hooks_token": {"tuning": PING_PONG, "wait": Granularity.token, "publish": True},
}


def main() -> int:
    """Exit code 1 where a product is wrong; what the sanitizer finds it says itself."""
    need_gpus()
    num_wrong = 0
    for name in sys.argv[1:] or CASES:
        chosen = {"layout": Layout.packed, **CASES[name]}
        case = Case(ROWS, n=264, k=200, num_gemm_ctas=6, limit_ns=1000 * LIMIT_NS, **chosen)
        case.run()
        verdict = case.verdict()
        wrong = not verdict.passed or case.num_written_outside() or case.queue()
        sys.stdout.write(f"{name}: {'wrong ' + verdict.detail if wrong else 'right'}\n")
        num_wrong += bool(wrong)
    return int(num_wrong > 0)


if __name__ == "__main__":
    run(main)
