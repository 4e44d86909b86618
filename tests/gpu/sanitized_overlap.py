"""Small fused launches of both operations, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized_overlap

Also with `--tool initcheck`, `racecheck` and `synccheck`; names of cases choose some of them. A
sanitizer slows kernels down a hundredfold, so the waits' limit is a thousand times the usual one.
What racecheck says of the hand-out of tiles is no finding: see sanitized_gemm.
"""

import sys

from benchmarks.program import need_gpus, run
from tests.experiments.groups import random_routing
from tests.gpu.overlaps import Chosen, FusedCase, HomeCase
from tilepipe.config.choices import (
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Push,
    Roles,
    Walk,
)
from tilepipe.kernels.gemm.plan import GemmTuning

TOKENS = [(37, 129, 5, 0), (64, 0, 31, 128)]  # of each rank, launch by launch
SMALL = {"num_ranks": 2, "num_experts": 4, "num_ctas": 1, "num_sms": 8, "watchdog_s": 20_000.0}
HOME = {"hidden": 128, "n": 512, "num_chunks": 2}
OUT_CASES = {
    "out_tma": {},
    "out_simt": {"copy": Copy.simt},
    "out_together": {"roles": Roles.switch, "opens": True, "gates": True},
    "out_beside": {"roles": Roles.beside, "opens": True, "gates": True},
    # Four ranks and more: CTAs that have sent join in step.
    "out_joining": {
        "roles": Roles.switch,
        "opens": True,
        "gates": True,
        "copy": Copy.simt,
        "num_ranks": 4,
        "num_sms": 16,
    },
    "out_token": {"granularity": Granularity.token, "layout": Layout.packed},
    "out_cluster": {
        "tuning": GemmTuning(cluster_m=2),
        "num_ctas": 2,
        "num_sms": 16,
        "granularity": Granularity.expert,
    },
}
HOME_CASES = {
    "home_tma": {"roles": Roles.switch},
    "home_simt": {"copy": Copy.simt, "roles": Roles.switch},
    "home_beside": {"roles": Roles.beside, "push": Push.epilogue, "walk": Walk.chunk},
    "home_token": {"granularity": Granularity.token, "home_granularity": HomeGranularity.rank},
    "home_expert": {"granularity": Granularity.expert, "layout": Layout.packed},
}


def main() -> int:
    """Exit code 1 where an output is wrong; what the sanitizer finds it says itself."""
    need_gpus()
    num_wrong = 0
    for name in sys.argv[1:] or (*OUT_CASES, *HOME_CASES):
        goes_home = name in HOME_CASES
        shape = HOME if goes_home else {"hidden": 136, "n": 264}
        chosen = Chosen(**(SMALL | shape | (HOME_CASES | OUT_CASES)[name]))
        routings = [
            random_routing(
                tokens[: chosen.num_ranks],
                num_experts=chosen.num_experts,
                num_topk=2,
                kind="masked",
                seed=number,
            )
            for number, tokens in enumerate(TOKENS)
        ]
        case = (HomeCase if goes_home else FusedCase)(chosen, routings)
        faults = []
        for number, routing in enumerate(routings, start=1):
            case.prepare(routing, number)
            faults += case.run()
        sys.stdout.write(f"{name}: {'; '.join(faults) or 'right'}\n")
        num_wrong += bool(faults)
    return int(num_wrong > 0)


if __name__ == "__main__":
    run(main)
