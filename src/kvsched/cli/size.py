"""`kvsched size`: how many tokens a deployment holds, from a config.json and what its memory is spent on.

What lives here: flags and printing. What does not: the sizing itself (`kvsched.sizing`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import click

from kvsched.cli.accelerators import ACCELERATORS, accelerator
from kvsched.cli.model_files import (
    COUNT,
    Bytes,
    Invalid,
    Numbers,
    Share,
    cache_dtype,
    checkpoint_beside,
    model_at,
    opt,
    options,
    per_stage,
    state_dtypes,
)
from kvsched.cli.tables import items_table, table
from kvsched.errors import ConfigError
from kvsched.sizing.account import Item, Provenance, misbooked_weights
from kvsched.sizing.amounts import gib, parse_bytes
from kvsched.sizing.costs import Widths
from kvsched.sizing.deployment import MAX_RUNNING, STEP_TOKENS, Deployment
from kvsched.sizing.dtypes import Dtype
from kvsched.sizing.geometry import Model
from kvsched.sizing.report import Report
from kvsched.sizing.sized import layer_report, size
from kvsched.sizing.whatif import Answer, Goal, what_if

_NAMED = ("activation", "graphs", "workspace", "other")
"""Items with a flag of their own."""

_MEMORY = options(
    opt("--gpu-bytes", Bytes(many=True), None, "Memory of one GPU that may be used; with --pp, one for all stages or one for each."),
    opt("--gpu", str, None, f"The same by name: {', '.join(ACCELERATORS)}.", metavar="NAME"),
    opt("--utilization", Share(), None, "Share of it that the server may use; the rest is booked as holdback.  [default: all of it]"),
    opt("--weights-bytes", Bytes(many=True), None, "Weights on one rank, as loaded; with --pp, one for all stages or one for each."),
    opt("--checkpoint-bytes", Bytes(), None,
        "All weights: taken to split evenly over tp x pp without --weights-bytes, and else held against them.  [default: as the index file beside "
        "CONFIG says]"),
    opt("--activation-bytes", Bytes(), None, "Peak of a forward pass on one rank."),
    opt("--graph-bytes", Bytes(), None, "Captured graphs on one rank."),
    opt("--workspace-bytes", Bytes(), None, "Workspaces of kernels on one rank."),
    opt("--other-bytes", Bytes(), None, "Anything else on one rank: contexts, communication, fragmentation."),
    click.option("--item", "extra", multiple=True, metavar="NAME=SIZE[:PROVENANCE]",
                 help="A further line item of one rank, configured, measured or derived; may be given again."),
    opt("--kv-bytes", Bytes(many=True), None, "Instead of all of these: the token pool of one rank itself."),
)
_SPLIT = options(
    opt("--tp", COUNT, 1, "Tensor-parallel ranks: they split the heads."),
    opt("--pp", COUNT, 1, "Pipeline stages: they split the layers."),
    opt("--cut", Numbers(), None, "Layers of each stage.  [default: as even as can be]"),
    opt("--cp", COUNT, 1, "Context-parallel ranks: they split every page by tokens."),
)
_CACHE = options(
    opt("--kv-dtype", str, None, "Type of the KV cache; no auto.  [default: torch_dtype of CONFIG]"),
    opt("--page-size", COUNT, 16, "Tokens per page."),
    opt("--reserved-pages", click.IntRange(min=0), 0, "Pages that are never handed out (a null page, a scratch page)."),
    opt("--scale-bytes", click.IntRange(min=0), 0, "What a quantised cache keeps besides, per token and attention layer on one rank."),
    opt("--context-limit", COUNT, None, "Prompt + new tokens of one request.  [default: what the model was trained for]"),
    opt("--draft", click.Path(path_type=Path), None, "config.json of a draft model, whose cache stands on the last stage.", metavar="CONFIG"),
    opt("--nextn-layers", click.IntRange(min=0), 0, "Multi-token-prediction layers that are used, with a cache like that of the last layer."),
)
_STATE = options(
    opt("--max-running", COUNT, None,
        f"Requests that run at once, for which constant-size state is kept.  [default: as many as fit at the full context, at most {MAX_RUNNING}]"),
    opt("--state-slots", COUNT, None, "Slots of recurrent state as allocated, padding included.  [default: from --max-running]"),
    opt("--slots-per-request", COUNT, 1, "Of those, for each running request."),
    opt("--transient-slots", click.IntRange(min=0), 0, "Of those, for a moment in each step, or padding."),
    opt("--state-dtype", str, None, "Type of recurrent states.  [default: as CONFIG says, else its torch_dtype]"),
    opt("--conv-dtype", str, None, "Type of the convolutions' past.  [default: torch_dtype of CONFIG]"),
    opt("--draft-tokens", click.IntRange(min=0), 0, "Tokens verified in one step: recurrent layers keep a state after each."),
    click.option("--recycle-windows", is_flag=True, help="Layers with a sliding window have pools of their own and give pages back."),
    opt("--recycle-interval", COUNT, None, "Tokens after which they do.  [default: a page]"),
    opt("--step-tokens", COUNT, STEP_TOKENS, "Tokens of one step, which such layers must stage."),
    opt("--cross-tokens", COUNT, None, "Tokens of images or audio that cross-attention keeps for a request.  [default: as CONFIG says]"),
)
_WHAT_IF = options(
    opt("--for-tokens", COUNT, None, "What would have to change for a pool of so many tokens."),
    opt("--for-concurrency", COUNT, None, "What would have to change for so many requests at once; with --at-length."),
    opt("--at-length", COUNT, None, "Length of those requests, in slots: prompt + new tokens - 1."),
)


@click.command(name="size")
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path))
@_MEMORY
@_SPLIT
@_CACHE
@_STATE
@_WHAT_IF
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(path: Path, as_json: bool, **given: Any) -> None:
    """Say how many tokens a deployment holds, and why.

    CONFIG is the config.json of a model, or the directory it is in. Every size is of one rank, a number of bytes or one with a suffix
    (KiB, MiB, GiB; kB, MB, GB are powers of ten). Without --gpu-bytes, --gpu or --kv-bytes only the cost of a token and of a request is said.
    Nothing is estimated: what is not given is not booked. docs/sizing.md works one example by hand.

    Exit code: 0, or 2 for input that cannot be used.
    """
    try:
        found, report, answer = _sized(path, given)
    except ConfigError as error:
        raise Invalid(str(error)) from None
    if as_json:
        click.echo(json.dumps({**found, **report.as_dict(), **({} if answer is None else {"what_if": answer.as_dict()})}))
    else:
        click.echo("\n".join([*_lines(report, found["kv_dtype_from"]), *(_what_if_lines(answer) if answer is not None else ())]))


def _sized(path: Path, given: dict[str, Any]) -> tuple[dict[str, str], Report, Answer | None]:
    """Where figures come from, the report, and the answer to a question about it."""
    model, file = model_at(path)
    kv, kv_note = cache_dtype(given["kv_dtype"], model)
    deployment, measured = _deployment(model, file, given, kv)
    goal = _goal(given)
    if not measured and goal is not None:
        raise ConfigError("--for-tokens and --for-concurrency need --gpu-bytes, --gpu or --kv-bytes to start from")
    report = size(model, deployment) if measured else layer_report(model, deployment)
    report = attrs.evolve(report, warnings=(*report.warnings, *_misbooked(report, file, given)))
    answer = what_if(model, deployment, report, goal) if goal is not None else None
    return {"config": str(file), "kv_dtype_from": kv_note}, report, answer


def _goal(given: dict[str, Any]) -> Goal | None:
    tokens, requests, slots = given["for_tokens"], given["for_concurrency"], given["at_length"]
    if (requests is None) != (slots is None):
        raise ConfigError("--for-concurrency and --at-length go together")
    if tokens is not None and requests is not None:
        raise ConfigError("--for-tokens and --for-concurrency are two questions: ask one")
    return None if tokens is None and requests is None else Goal(tokens=tokens, requests=requests, slots=slots)


def _deployment(model: Model, file: Path, given: dict[str, Any], kv: Dtype) -> tuple[Deployment, bool]:
    """The deployment, and whether there is memory to size."""
    state, conv = state_dtypes(given["state_dtype"], given["conv_dtype"], model)
    pp = given["pp"]
    if given["cut"] is not None and pp == 1:
        pp = len(given["cut"])
    if pp > len(model.layers):
        raise ConfigError(f"--pp must be from 1 to {len(model.layers)}, the number of layers, not {pp}")
    memory, measured = _memory(file, given, pp)
    recycle = given["recycle_interval"] or (given["page_size"] if given["recycle_windows"] else None)
    return Deployment(
        widths=Widths(kv=kv, state=state, conv=conv, scale_bytes=given["scale_bytes"]), pp=pp, recycle_interval=recycle,
        draft=model_at(given["draft"])[0] if given["draft"] is not None else None, extra_layers=given["nextn_layers"],
        **{key: given[key] for key in (
            "page_size", "tp", "cp", "cut", "context_limit", "reserved_pages", "max_running", "state_slots", "slots_per_request",
            "transient_slots", "draft_tokens", "step_tokens", "cross_tokens")},
        **memory,
    ), measured


def _memory(file: Path, given: dict[str, Any], pp: int) -> tuple[dict[str, Any], bool]:
    """Budgets and items of each stage, or the pool itself; and whether either is there."""
    kv_bytes = per_stage("--kv-bytes", given["kv_bytes"], pp)
    booked = [f"--{name.replace('_', '-')}" for name in ("gpu_bytes", "gpu", "weights_bytes", "checkpoint_bytes") if given[name] is not None]
    if kv_bytes is not None:
        if booked:
            raise ConfigError(f"--kv-bytes is the pool itself, and stands instead of {', '.join(booked)}")
        return {"kv_bytes": kv_bytes}, True
    if given["gpu_bytes"] is not None and given["gpu"] is not None:
        raise ConfigError("--gpu-bytes and --gpu say the same: give one")
    gpu = per_stage("--gpu-bytes", given["gpu_bytes"], pp)
    if gpu is None and given["gpu"] is not None:
        gpu = (accelerator(given["gpu"]).bytes,) * pp
    if gpu is None:
        if booked:
            raise ConfigError("--gpu-bytes or --gpu must be given with the weights")
        return {"kv_bytes": (0,) * pp}, False
    weights = _weights(file, given, pp, given["tp"])
    common = _common_items(given)
    items = []
    for total, own in zip(gpu, weights, strict=True):
        held = () if given["utilization"] is None else (Item(
            "holdback", total - int(total * given["utilization"]), Provenance.CONFIGURED, f"--utilization {float(given['utilization']):g}"),)
        items.append((own, *held, *common))
    return {"budgets": gpu, "items": tuple(items)}, True


def _weights(file: Path, given: dict[str, Any], pp: int, tp: int) -> tuple[Item, ...]:
    stated = per_stage("--weights-bytes", given["weights_bytes"], pp)
    if stated is not None:
        return tuple(Item("weights", one, Provenance.CONFIGURED, "--weights-bytes") for one in stated)
    known = _checkpoint(file, given)
    if known is None:
        raise ConfigError("--weights-bytes (of one rank, as loaded) or --checkpoint-bytes (of all ranks) must be given")
    checkpoint, note = known
    share = -(-checkpoint // (tp * pp))
    return (Item("weights", share, Provenance.DERIVED, f"{note} {checkpoint:,} B / {tp * pp}, as if it split evenly"),) * pp


def _checkpoint(file: Path, given: dict[str, Any]) -> tuple[int, str] | None:
    """Bytes of all weights, and who says so."""
    return (given["checkpoint_bytes"], "--checkpoint-bytes") if given["checkpoint_bytes"] is not None else checkpoint_beside(file)


def _misbooked(report: Report, file: Path, given: dict[str, Any]) -> list[str]:
    """Complaints about weights that are less than the checkpoint (law G7)."""
    known = _checkpoint(file, given)
    if known is None or given["weights_bytes"] is None:
        return []
    found = misbooked_weights(
        [stage.item("weights") for stage in report.stages], -(-known[0] // report.deployment.tp), [len(stage.own.layers) for stage in report.stages])
    return [f"{one}: all ranks together hold less than the checkpoint" for one in found]


def _common_items(given: dict[str, Any]) -> tuple[Item, ...]:
    found = [
        Item(name, size, Provenance.CONFIGURED, f"--{flag}-bytes")
        for name, flag in zip(_NAMED, ("activation", "graph", "workspace", "other"), strict=True)
        if (size := given[f"{flag}_bytes"]) is not None
    ]
    found += [_extra_item(text) for text in given["extra"]]
    return tuple(found)


def _extra_item(text: str) -> Item:
    """An item from NAME=SIZE or NAME=SIZE:PROVENANCE."""
    name, sign, amount = text.partition("=")
    amount, _, said = amount.partition(":")
    allowed = [one.value for one in Provenance]
    if not sign or not name.strip() or (said and said not in allowed):
        raise ConfigError(f"--item must be NAME=SIZE or NAME=SIZE:PROVENANCE with {', '.join(allowed)}, not {text!r}")
    return Item(name.strip(), parse_bytes(amount, f"--item {name.strip()}"), Provenance(said or "configured"), "--item")


def _lines(report: Report, kv_note: str) -> list[str]:
    at, own = report.deployment, report.binding
    split = [f"{key} {value}" for key, value in (("tp", at.tp), ("pp", at.pp), ("cp", at.cp)) if value > 1]
    out = [
        ", ".join([f"{report.model.model_type} of {len(report.model.layers)} layers", *split, f"KV cache in {at.widths.kv} ({kv_note})"]), "",
    ]
    place = f" of stage {own.own.number}" if at.pp > 1 else ""
    if report.pages:
        out += [
            f"{report.tokens:,} tokens, in {report.usable_pages:,} pages of {at.page_size}",
            f"{report.max_servable_tokens:,} slots for the longest request (prompt + new tokens - 1), bound by "
            + ("the pool" if report.context is None or report.max_servable_tokens < report.context - 1 else f"the context limit of {report.context:,}"),
        ]
    out.append(f"{report.token_bytes:,} B for a token on one rank{place}, {report.page_bytes:,} B for a page")
    out += [
        f"{size_:,} B of {what} for a request on one rank{place}"
        for size_, what in (
            (report.state_bytes_per_request, f"recurrent state in {at.widths.state}"), (own.own.constants.speculative, "speculative state"),
            (own.own.constants.cross, "cross-attention"), (own.own.constants.windows, "windows")) if size_
    ]
    if report.pages:
        out += ["", *_stage_tables(report), "", *_concurrency_lines(report)]
    else:
        out += ["", "Say --gpu-bytes and --weights-bytes, --gpu and --checkpoint-bytes, or --kv-bytes for a pool."]
    return [*out, *(f"note: {one}" for one in report.warnings)]


def _stage_tables(report: Report) -> list[str]:
    """One table for equal stages; else one for each."""
    out: list[str] = []
    for stage in report.stages:
        if report.deployment.pp > 1:
            binds = ", which binds" if stage.own.number == report.pool.binding else ""
            held = "any number of" if stage.capacity is None else f"{stage.capacity:,}"
            out.append(
                f"stage {stage.own.number}: layers {stage.own.layers.start} to {stage.own.layers.stop - 1}, {stage.own.cost.attention} with attention, "
                f"{stage.own.token_bytes:,} B for a token, room for {held} tokens{binds}")
        out += items_table(stage.account)
    return out


def _concurrency_lines(report: Report) -> list[str]:
    rows = [(f"{one.slots:,}", f"{one.requests:,}", one.binding) for one in report.concurrency]
    return table(("slots each", "at once", "bound by"), rows, right={0, 1})


def _what_if_lines(answer: Answer) -> list[str]:
    if answer.reached:
        return ["", f"{answer.goal}: held as it is"]
    if answer.obstacle:
        return ["", f"{answer.goal}: not possible; {answer.obstacle}"]
    short = max(answer.short)
    out = ["", f"{answer.goal}: not held" + (f", {gib(short)} GiB short on each rank of stage {answer.short.index(short)}" if short else "")]
    if not answer.changes:
        return [*out, "  no single change that was tried reaches it"]
    out.append("  any one of these would do:")
    for change in answer.changes:
        at = f", {change.requests:,} at once" if change.requests is not None else ""
        out.append(f"  - {change.what}: {change.tokens:,} tokens{at}" + (f" ({change.note})" if change.note else ""))
    return out
