"""Small whole layers, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized_layer

Also with `--tool initcheck`, `racecheck` and `synccheck`; names of cases choose some of them. A
sanitizer slows kernels down a hundredfold, so the waits' limit is a thousand times the usual one.
"""

import sys

import torch

from benchmarks.program import need_gpus, run
from tests.experiments.groups import random_routing
from tests.gpu.layers import ChosenLayer, LayerCase
from tilepipe.config.choices import Copy, Granularity, Layout, Push, Roles, Walk
from tilepipe.fabric.table import Slot

TOKENS = [(37, 129), (64, 0)]  # of each rank, launch by launch
SMALL = {
    "num_ranks": 2,
    "num_experts": 4,
    "num_ctas": 1,
    "num_sms": 8,
    "watchdog_s": 20_000.0,
    "hidden": 512,
    "intermediate": 136,
    "num_chunks": 2,
}
CASES = {
    "tma": {},
    "simt": {"copy": Copy.simt},
    "beside": {"roles": Roles.beside, "push": Push.epilogue, "walk": Walk.chunk},
    "token": {"granularity": Granularity.token, "layout": Layout.packed},
}


def main() -> int:
    """Exit code 1 where a token is wrong; what the sanitizer finds it says itself."""
    need_gpus()
    num_wrong = 0
    for name in sys.argv[1:] or CASES:
        chosen = ChosenLayer(**(SMALL | CASES[name]))
        routings = [
            random_routing(
                tokens, num_experts=chosen.num_experts, num_topk=2, kind="masked", seed=number
            )
            for number, tokens in enumerate(TOKENS)
        ]
        layer, faults = LayerCase(chosen, routings), []
        for number, routing in enumerate(routings, start=1):
            layer.prepare(routing, payload=number)
            layer.run(layer.fused)
            faults += layer.wrong()
            fused = layer.tokens(Slot.out)
            layer.run(layer.unfused)
            equal = all(map(torch.equal, fused, layer.tokens(Slot.reduced)))
            faults += ["bits differ from those of the unfused layer"] * (not equal)
        sys.stdout.write(f"{name}: {'; '.join(faults) or 'right'}\n")
        num_wrong += bool(faults)
    return int(num_wrong > 0)


if __name__ == "__main__":
    run(main)
