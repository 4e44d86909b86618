"""Grouped GEMMs on one GPU whose outputs and surroundings are checked in every value.

Imported only where there is a GPU. Knows nothing of timing and of configurations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from tilepipe.config.choices import Granularity, Layout
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.products import (
    compare_products,
    concatenated_swiglu,
    interleaved_swiglu,
    scaled_rows,
)
from tilepipe.fabric.loopback import LoopbackHeap
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.choices import Clip, Epilogue, Major
from tilepipe.kernels.gemm.launch import GroupedGemm, alone_specs, upload_tiles
from tilepipe.kernels.gemm.plan import BLOCK_M, GemmProblem, GemmTuning, plan_gemm
from tilepipe.measure.gate import BF16_POISON
from tilepipe.records import Verdict
from tilepipe.schedule.layout import make_layout
from tilepipe.schedule.settings import PlanSettings

NUM_SMS = 132
# Elements before and behind the output that nobody may write.
GUARD = 4096
LIMIT_NS = 2_000_000_000


class Case:
    """One problem in memory of its own: operands, a poisoned output, canaries around it."""

    def __init__(
        self,
        rows: Sequence[int],  # of each expert
        *,
        n: int = 512,
        k: int = 256,
        layout: Layout = Layout.padded,
        tuning: GemmTuning | None = None,
        num_gemm_ctas: int = NUM_SMS,
        plan_tile_m: int = 128,
        seed: int = 0,
        limit_ns: int = LIMIT_NS,  # of one wait
        gap: int = 0,  # columns behind each output row that nobody may write
        **problem: object,
    ) -> None:
        tuning = tuning or GemmTuning()
        asked = GemmProblem(
            n=n, k=k, num_experts=len(rows), layout=layout, group_align=plan_tile_m, **problem
        )
        if gap:
            out_n = n // 2 if asked.epilogue.is_swiglu else n
            asked = replace(asked, d_pitch=out_n + gap)
        self.plan = plan_gemm(asked, tuning, num_gemm_ctas=num_gemm_ctas, num_sms=NUM_SMS)
        settings = PlanSettings(
            num_ranks=1,
            num_experts=len(rows),
            num_topk=1,
            tile_m=plan_tile_m,
            layout=layout,
            num_n_tiles=self.plan.num_n_tiles,
        )
        self.layout = make_layout(0, np.array([rows], np.int32), settings)
        self.num_rows = max(self.layout.extent, 1)
        self._make_tensors(torch.Generator("cuda").manual_seed(seed))
        self.heap = LoopbackHeap(
            alone_specs(
                num_tiles=max(self.layout.num_tiles, 1),
                num_chunks=self.plan.num_chunks,
                num_counters=max(self.layout.num_tiles, len(rows)),
                num_rows=self.num_rows,
            ),
            num_ranks=1,
            device=torch.device("cuda", torch.cuda.current_device()),
        )
        self.records = upload_tiles(self.heap, 0, self.layout, self.plan)
        self.set_expected()
        self._limit_s = limit_ns / 1e9
        self.gemm = GroupedGemm(self.plan, limit_ns=limit_ns)
        self.launch = self.gemm.bind(self.heap, 0, a=self.a, b=self.b, d=self.d, scale=self.scale)

    def _make_tensors(self, generator: torch.Generator) -> None:
        plan, problem = self.plan, self.plan.problem

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

        self.a = torch.full(
            (self.num_rows, problem.k), float("nan"), dtype=torch.bfloat16, device="cuda"
        )
        _, held = self.layout.held_rows()
        self.held = torch.from_numpy(held).cuda()
        self.a[self.held] = drawn(len(held), problem.k)
        b = drawn(problem.num_experts, problem.n, problem.k)
        b *= problem.k**-0.5
        self.weights = b  # (experts, n, k)
        self.b = b if problem.b_major is Major.k else b.transpose(1, 2).contiguous()
        self.scale = torch.rand(self.num_rows, generator=generator, device="cuda") - 0.5
        self._memory = torch.empty(
            2 * GUARD + self.num_rows * plan.d_pitch, dtype=torch.bfloat16, device="cuda"
        )
        self.d = self._memory[GUARD:].as_strided(
            (self.num_rows, plan.out_n), (plan.d_pitch, 1), GUARD
        )
        poison(self._memory)

    # Semaphores.

    def set_expected(self) -> None:
        """What a launch waits for: rows of M tiles or experts, and epoch 1 of rows."""
        by_expert = self.plan.problem.wait is Granularity.expert
        expected = self.layout.expert_rows if by_expert else self.layout.tiles[:, 2]
        self.expected = torch.from_numpy(expected.astype(np.int32)).cuda()
        self.heap.tensor(0, Slot.ready_expected)[: len(expected)] = self.expected
        self.heap.tensor(0, Slot.words)[int(Word.epoch)] = 1

    def raise_flags(self) -> None:
        """Say that all rows are here, on the current stream."""
        self.heap.tensor(0, Slot.ready)[: len(self.expected)].copy_(self.expected)
        self.heap.tensor(0, Slot.row_flag).fill_(1)

    def lower_flags(self) -> None:
        self.heap.tensor(0, Slot.ready).zero_()
        self.heap.tensor(0, Slot.row_flag).zero_()
        self.heap.tensor(0, Slot.tile_stored).zero_()

    # Running and checking.

    def run(self) -> None:
        """Launch on poisoned memory and wait, bounded."""
        poison(self._memory)
        self.lower_flags()
        self.raise_flags()
        self.launch()
        self.synchronize()

    def synchronize(self) -> None:
        done = torch.cuda.Event()
        done.record()
        self.heap.wait(done.query, limit_s=self._limit_s)

    def groups(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        for expert, count in enumerate(self.layout.expert_rows.tolist()):
            first = int(self.layout.expert_first_row[expert])
            rows = slice(first, first + count)
            yield rows, self.a[rows], self.weights[expert]

    def verdict(self) -> Verdict:
        epilogue = {
            Epilogue.none: None,
            Epilogue.swiglu_interleaved: interleaved_swiglu,
            Epilogue.swiglu_concatenated: concatenated_swiglu,
            Epilogue.row_scale: scaled_rows(self.scale),
        }[self.plan.problem.epilogue]
        return compare_products(
            self.d, self.groups(), epilogue=epilogue, contender="gemm", stage="test"
        )

    def picture(self) -> str:
        """Where values are wrong, by block of 64 x 64, and what stands there: what to read first.

        Of the first wrong block also where in its group values of the kind have their right place:
        a permutation shows as such.
        """
        if self.plan.problem.epilogue is not Epilogue.none:
            return "no picture of this epilogue"
        lines: list[str] = []
        for expert, (rows, a, b) in enumerate(self.groups()):
            want = (a.float() @ b.float().T).to(torch.bfloat16)
            got = self.d[rows]
            wrong = ~((got.float() - want.float()).abs() <= 0.02 + 0.02 * want.float().abs())
            for i, j in torch.nonzero(_blocks_with(wrong)).tolist():
                part = (slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64))
                lines.append(f"expert {expert} block {i},{j}: {_kinds(got[part], wrong[part])}")
                if len(lines) == 1:
                    lines += _whereabouts(got, want, wrong, 64 * i, 64 * j)
                if len(lines) > 40:
                    return "\n".join([*lines, "and more"])
        return "\n".join(lines)

    def num_written_outside(self) -> int:
        """Values behind groups, in gaps and guards that are no longer what they were."""
        bits = self._memory.view(torch.int16)
        touched = bits != BF16_POISON
        inside = touched[GUARD:].as_strided(
            (self.num_rows, self.plan.out_n), (self.plan.d_pitch, 1), GUARD
        )
        inside[self._writable()] = False
        return int(torch.count_nonzero(touched))

    def _writable(self) -> torch.Tensor:
        """Rows that a launch may write: its own, and with whole blocks those of a block of them."""
        if self.plan.clip is not Clip.whole:
            return self.held
        ends = -(-self.layout.expert_rows.astype(np.int64) // BLOCK_M) * BLOCK_M
        rows = [
            np.arange(first, first + end)
            for first, end in zip(self.layout.expert_first_row[:-1], ends, strict=True)
        ]
        return torch.from_numpy(np.concatenate(rows)).cuda()

    def queue(self) -> int:
        """The tickets word, which the last claim of a launch puts back."""
        return int(self.heap.tensor(0, Slot.words)[int(Word.gemm_queue)])

    def stored(self) -> list[list[int]]:
        """Rows told by M tile and chunk."""
        told = self.heap.tensor(0, Slot.tile_stored).view(-1, self.plan.num_chunks)
        return told[: self.layout.num_tiles].tolist()


def _blocks_with(wrong: torch.Tensor) -> torch.Tensor:
    """Blocks of 64 x 64 that hold any True."""
    rows, columns = (-(-size // 64) for size in wrong.shape)
    full = torch.zeros(rows * 64, columns * 64, dtype=torch.bool, device=wrong.device)
    full[: wrong.shape[0], : wrong.shape[1]] = wrong
    return full.view(rows, 64, columns, 64).any(3).any(1)


def _kinds(got: torch.Tensor, wrong: torch.Tensor) -> str:
    """What stands where values are wrong, and in which rows and columns of the block."""
    bits = got.contiguous().view(torch.int16)
    untouched, lost = bits == BF16_POISON, torch.isnan(got)
    kinds = {
        "wrong": wrong,
        "untouched": wrong & untouched,
        "nan": wrong & lost & ~untouched,
        "zero": wrong & (got == 0),
    }
    counts = ", ".join(f"{int(where.sum())} {kind}" for kind, where in kinds.items())
    rows, columns = (torch.nonzero(wrong.any(dim)).flatten().tolist() for dim in (1, 0))
    return f"{counts}; rows {_spans(rows)}, columns {_spans(columns)}"


def _spans(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(f"{first}-{last}" for first, last in spans[:12])


def _whereabouts(
    got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, row: int, column: int
) -> list[str]:
    """For some wrong values, places of the group where that value would be right."""
    lines = []
    places = torch.nonzero(wrong[row : row + 64, column : column + 64])
    for i, j in places[:: max(1, len(places) // 12)].tolist():
        at = (row + i, column + j)
        same = torch.nonzero(want == got[at])[:3].tolist()
        lines.append(f"  {at}: got {float(got[at]):g}, want {float(want[at]):g}; right at {same}")
    return lines
