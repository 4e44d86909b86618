"""Answers of engines that return routed experts with the text: SGLang and vLLM.

Knows nothing of other formats.

A file holds one answer as JSON, an array of them, or one a line. What is written (2026-11):

- SGLang (`--enable-return-routed-experts`, request `return_routed_experts`): base64 of int32
  in `meta_info.routed_experts` of `/generate`, in `choices[].sgl_ext.routed_experts` of the OpenAI
  endpoints (`state_capturer/routed_experts.py`, v0.5.16). The numbers are flat: tokens x layers x
  topk, tokens being prompt + completion - 1, layers all of the model's (`num_hidden_layers`; dense
  ones hold zeros), topk `num_experts_per_tok`. Neither is in the answer: topk is that of the
  workload, layers follow from the token counts in the answer, or are typed.
- vLLM (`--enable-return-routed-experts`): `choices[].routed_experts`, base64 of a `.npy`
  (num_tokens, num_layers, num_topk) from `/v1/completions` and `/inference/v1/generate`, nested
  lists from `/v1/chat/completions` (tests/entrypoints, 2026); v0.21 wrote nested lists, those of
  the prompt apart in `prompt_routed_experts`.
"""

import base64
import binascii
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.names import ROUTED
from tilepipe.workload.trace.refusals import refusal
from tilepipe.workload.trace.rows import Block, Met, Selection
from tilepipe.workload.trace.stored import BROKEN, stored
from tilepipe.workload.trace.values import values

__all__ = ["is_answer", "read_answers"]

_PROMPT = "prompt_routed_experts"


def is_answer(value: Any) -> bool:
    """Whether a JSON value looks like an answer of either engine."""
    return isinstance(value, dict) and bool({"meta_info", "choices", ROUTED, _PROMPT} & set(value))


def read_answers(path: str, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of all answers; a request is the answer's id, with /N where it has several choices."""
    form: tuple[int, ...] | None = None
    for place, answer in values(path):
        if not is_answer(answer):
            raise refusal(path, f"{place} is no answer of SGLang or vLLM")
        any_found = False
        for request, experts in _of_answer(path, place, answer, selection):
            any_found = True
            form = form or experts.shape[1:]
            if experts.shape[1:] != form:
                told = [
                    f"{layers} layers of topk {topk}" for layers, topk in (experts.shape[1:], form)
                ]
                raise refusal(path, f"{place} has {told[0]} where those before have {told[1]}")
            yield from _blocks(place, request, experts, selection, met)
        if not any_found:
            raise refusal(
                path,
                f"{place} has no {ROUTED}",
                "start the server with --enable-return-routed-experts and ask for them",
            )


def _blocks(
    place: str,
    request: str,
    experts: NDArray[np.integer],  # (num_tokens, num_layers, num_topk)
    selection: Selection,
    met: Met,
) -> Iterator[Block]:
    met.requests.add(request)
    for layer in range(experts.shape[1]):
        ids = experts[:, layer]
        if ids.shape[1] > 1 and len(ids) and not ids.any():
            continue  # zeros throughout: a layer without experts
        met.layers.add(layer)
        if selection.layer in (None, layer) and selection.request in (None, request):
            yield Block(
                ids=ids, weights=None, layer=layer, place=lambda row: f"{place}, token {row}"
            )


def _of_answer(
    path: str, place: str, answer: dict[str, Any], selection: Selection
) -> Iterator[tuple[str, NDArray[np.integer]]]:
    """Request and experts (num_tokens, num_layers, num_topk) of each part of an answer."""
    meta, choices = answer.get("meta_info"), answer.get("choices")
    if isinstance(meta, dict):
        num_tokens = _num_tokens(meta)
        name = str(meta.get("id", place))
        if meta.get(ROUTED) is not None:
            yield name, _decode(path, place, meta[ROUTED], selection, num_tokens)
        return
    name = str(answer.get("id", place))
    if answer.get(_PROMPT) is not None:
        yield name, _decode(path, place, answer[_PROMPT], selection, None)
    parts = choices if isinstance(choices, list) else [answer]
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            raise refusal(path, f"{place} has a choice that is no object")
        extra = part.get("sgl_ext")
        held = extra.get(ROUTED) if isinstance(extra, dict) else part.get(ROUTED)
        if held is not None:
            request = name if len(parts) == 1 else f"{name}/{number}"
            usage = answer.get("usage")
            alone = isinstance(usage, dict) and len(parts) == 1
            num_tokens = _num_tokens(usage) if alone and isinstance(usage, dict) else None
            yield request, _decode(path, place, held, selection, num_tokens)


def _num_tokens(told: dict[str, Any]) -> int | None:
    """Tokens whose experts SGLang knows: the last one generated was never fed back."""
    counts = [told.get(f"{part}_tokens") for part in ("prompt", "completion")]
    if all(type(count) is int for count in counts):
        return sum(counts) - 1  # type: ignore[arg-type]
    return None


def _decode(
    path: str, place: str, held: Any, selection: Selection, num_tokens: int | None
) -> NDArray[np.integer]:  # (num_tokens, num_layers, num_topk)
    experts: NDArray[Any]
    if isinstance(held, str):
        try:
            content = base64.b64decode(held, validate=True)
        except (binascii.Error, ValueError):
            raise refusal(path, f"{place} has {ROUTED} that are no base64") from None
        if not content.startswith(b"\x93NUMPY"):
            return _flat(path, place, content, selection, num_tokens)
        try:
            array = stored(io.BytesIO(content), len(content))
            experts = array.rows(0, array.shape[0]) if array.shape else np.zeros((), array.dtype)
        except BROKEN:
            raise refusal(path, f"{place} has a .npy that was cut short") from None
    else:
        try:
            experts = np.array(held)
        except ValueError:
            raise refusal(path, f"{place} has lists of unequal length") from None
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        told = f"{ROUTED} of {experts.dtype} {experts.shape}"
        raise refusal(path, f"{place} has {told}, not integers (tokens, layers, topk)")
    checked: NDArray[np.integer] = experts
    return checked


def _flat(
    path: str, place: str, content: bytes, selection: Selection, num_tokens: int | None
) -> NDArray[np.integer]:
    """SGLang's numbers in their shape, which the answer does not say."""
    if len(content) % 4:
        raise refusal(path, f"{place} has {len(content)} bytes of {ROUTED}, no int32")
    flat, num_topk = np.frombuffer(content, "<i4"), selection.num_topk
    if num_topk is None:
        raise refusal(path, f"{place} does not say its topk", "type num_topk=K")
    num_layers = selection.num_layers
    if num_layers is None:
        if num_tokens is None or num_tokens < 1:
            told = "has no counts of tokens to tell its layers by"
            raise refusal(path, f"{place} {told}", "type routing.num_layers=N")
        num_layers = len(flat) // (num_tokens * num_topk)
        fits = num_layers > 0 and num_layers * num_tokens * num_topk == len(flat)
        known = f"{num_tokens} tokens of topk {num_topk}"
    else:
        fits = len(flat) % (num_layers * num_topk) == 0
        known = f"{num_layers} layers of topk {num_topk}"
    if not fits:
        raise refusal(
            path,
            f"{place} has {len(flat)} ids, which is no whole number of {known}",
            "type the model's topk, and routing.num_layers=N where a prefix was left out",
        )
    return flat.reshape(-1, num_layers, num_topk)
