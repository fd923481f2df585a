"""`kvsched cut`: how a pipeline is cut into stages, which stage binds, and what a boot says about cuts that were never booted.

What lives here: flags and printing. What does not: the arithmetic (`kvsched.sizing.cuts`, `kvsched.sizing.boot`,
`kvsched.sizing.forecast`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    cache_dtype,
    model_at,
    opt,
    options,
    per_stage,
    read_json,
    state_dtypes,
)
from kvsched.cli.tables import items_table, table
from kvsched.errors import ConfigError
from kvsched.sizing.amounts import MIB, gib
from kvsched.sizing.boot import Boot
from kvsched.sizing.capacity import max_servable_tokens
from kvsched.sizing.costs import LayerCosts, Widths
from kvsched.sizing.cuts import Placement, search, sized_cut
from kvsched.sizing.deployment import STEP_TOKENS, Deployment
from kvsched.sizing.forecast import Forecast, Layers, best_forecast, check_layers, forecast
from kvsched.sizing.geometry import Model
from kvsched.sizing.predict import NOISE_FLOOR, RESERVE_BAND, band_tokens, compare, micro_batch_cap
from kvsched.sizing.report import Report
from kvsched.sizing.stages import check_cut, even_cut

_STAGES = options(
    opt("--cut", Numbers(), (), "Layers of each stage, to be worked out; may be given again.  [default: an even cut, and the best]", multiple=True),
    opt("--stages", COUNT, None, "Pipeline stages.  [default: as many as the lists, the cuts or the boot have]"),
    opt("--gpu-bytes", Bytes(many=True), None, "Memory of one GPU that may be used, for all stages or for each."),
    opt("--gpu", str, None, f"The same by name: {', '.join(ACCELERATORS)}.", metavar="NAME"),
    opt("--layer-bytes", Bytes(), None, "Weights of one layer on one rank."),
    opt("--checkpoint-bytes", Bytes(), None, "Instead: all weights, taken as layers of one size, split over --tp."),
    opt("--fixed-bytes", Bytes(many=True), None, "What stays on one rank whatever the cut, for all stages or for each: embedding, head, activations.  [default: 0]"),
    opt("--reserve", Bytes(many=True), None,
        "What one rank will keep back, for all stages or for each. Read from boots and never modelled, so it must be said for a cut that was "
        "never booted."),
)
_BOOT = options(
    opt("--boot", click.Path(path_type=Path), None, "What one boot printed (docs/sizing.md); predictions then start from it.", metavar="FILE"),
    opt("--band", Bytes(), RESERVE_BAND, "How far the reserve may be off either way; predictions are printed with it."),
    opt("--present-tokens", COUNT, None, "Present pool to hold predictions against.  [default: that of the boot]"),
    opt("--noise-floor", click.FloatRange(min=0), NOISE_FLOOR, "Relative gain below which a prediction is no finding."),
    opt("--running", COUNT, None, "Requests that run: says how many go into one micro-batch."),
)
_CACHE = options(
    opt("--tp", COUNT, 1, "Tensor-parallel ranks of each stage."),
    opt("--kv-dtype", str, None, "Type of the KV cache; no auto.  [default: torch_dtype of CONFIG]"),
    opt("--page-size", COUNT, 16, "Tokens per page."),
    opt("--scale-bytes", click.IntRange(min=0), 0, "What a quantised cache keeps besides, per token and attention layer on one rank."),
    opt("--context-limit", COUNT, None, "Prompt + new tokens of one request.  [default: what the model was trained for]"),
    opt("--max-running", COUNT, None, "Requests for which constant-size state is kept."),
    opt("--state-slots", COUNT, None, "Slots of recurrent state as allocated.  [default: from --max-running]"),
    opt("--slots-per-request", COUNT, 1, "Of those, for each running request."),
    opt("--transient-slots", click.IntRange(min=0), 0, "Of those, for a moment in each step, or padding."),
    opt("--draft-tokens", click.IntRange(min=0), 0, "Tokens verified in one step: recurrent layers keep a state after each."),
    opt("--state-dtype", str, None, "Type of recurrent states.  [default: as CONFIG says, else its torch_dtype]"),
    opt("--conv-dtype", str, None, "Type of the convolutions' past.  [default: torch_dtype of CONFIG]"),
    opt("--step-tokens", COUNT, STEP_TOKENS, "Tokens of one step."),
    opt("--cross-tokens", COUNT, None, "Tokens of images or audio that cross-attention keeps for a request.  [default: as CONFIG says]"),
)


@click.command(name="cut")
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path))
@_STAGES
@_BOOT
@_CACHE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(path: Path, as_json: bool, **given: Any) -> None:
    """Cut a pipeline into stages, and say what each holds and which one binds.

    The pool of a pipeline is what its smallest stage holds. Without --boot, cuts are worked out from sizes that are given, and the best one is
    searched for. With --boot, the chain of figures that a boot printed is verified first; other cuts are then predicted from it, with --reserve
    and --layer-bytes, and a stage that stays as it was booted bounds them.

    Exit code: 0, or 2 for input that cannot be used, a boot that does not hang together included.
    """
    try:
        model, file = model_at(path)
        found, lines = _from_boot(model, given) if given["boot"] is not None else _from_sizes(model, given)
    except ConfigError as error:
        raise Invalid(str(error)) from None
    if as_json:
        click.echo(json.dumps({"config": str(file), **found, **_micro_batches(given, len(found["cut"]))}))
    else:
        click.echo("\n".join([*lines, *_micro_batch_lines(given, len(found["cut"]))]))


def _micro_batches(given: dict[str, Any], stages: int) -> dict[str, Any]:
    running = given["running"]
    if running is None:
        return {}
    return {"micro_batch_cap": {
        "decode_in_stages": micro_batch_cap(running, stages), "decode_in_another_layout": micro_batch_cap(running, stages, decode_in_stages=False)}}


def _micro_batch_lines(given: dict[str, Any], stages: int) -> list[str]:
    caps = _micro_batches(given, stages)
    if not caps:
        return []
    both = caps["micro_batch_cap"]
    elsewhere = both["decode_in_another_layout"]
    return [f"{given['running']} running requests: at most {both['decode_in_stages']} in a micro-batch, {elsewhere} where decode runs in another layout"]


def _widths(model: Model, given: dict[str, Any]) -> Widths:
    kv, _ = cache_dtype(given["kv_dtype"], model)
    state, conv = state_dtypes(given["state_dtype"], given["conv_dtype"], model)
    return Widths(kv=kv, state=state, conv=conv, scale_bytes=given["scale_bytes"])


def _base(model: Model, given: dict[str, Any]) -> Deployment:
    return Deployment(widths=_widths(model, given), kv_bytes=(0,), **{key: given[key] for key in (
        "page_size", "tp", "context_limit", "max_running", "state_slots", "slots_per_request", "transient_slots", "draft_tokens", "step_tokens",
        "cross_tokens")})


def _layer_bytes(model: Model, given: dict[str, Any], tp: int) -> tuple[int, str]:
    if (given["layer_bytes"] is None) == (given["checkpoint_bytes"] is None):
        raise ConfigError("--layer-bytes (of one rank) or --checkpoint-bytes (of all) must be given, and not both")
    if given["layer_bytes"] is not None:
        return int(given["layer_bytes"]), ""
    layers, whole = len(model.layers), int(given["checkpoint_bytes"])
    return -(-whole // (layers * tp)), f", --checkpoint-bytes / {layers} layers / tp {tp}"


# -- cuts that were never booted --------------------------------------------------------------------------------------


def _from_sizes(model: Model, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Work out the cuts that are named, or the even and the best one."""
    stages = _stage_count(given)
    if stages > len(model.layers):
        raise ConfigError(f"--stages must be from 1 to {len(model.layers)}, the number of layers, not {stages}")
    placement = _placement(model, given, stages)
    base = _base(model, given)
    named = [check_cut(cut, len(model.layers)) for cut in given["cut"]]
    if named:
        reports = [sized_cut(model, base, placement, cut) for cut in named]
        chosen = max(reports, key=lambda report: report.tokens)
    else:
        chosen = search(model, base, placement)
        reports = [chosen]
        even = even_cut(len(model.layers), stages)
        if even != chosen.deployment.cut and (other := _if_it_holds(model, base, placement, even)) is not None:
            reports.append(other)
            chosen = max(reversed(reports), key=lambda report: report.tokens)  # the even cut, where no other holds more
    cuts = [_cut_of_report(report, given) for report in reports]
    return {**chosen.as_dict(), "cuts": cuts}, _size_lines(reports, chosen, given, searched=not named)


def _if_it_holds(model: Model, base: Deployment, placement: Placement, cut: Sequence[int]) -> Report | None:
    """The report of a cut, or None where it holds no page."""
    try:
        return sized_cut(model, base, placement, cut)
    except ConfigError:
        return None


def _stage_count(given: dict[str, Any]) -> int:
    """How many stages the flags speak of."""
    counts: dict[str, int] = {"--stages": given["stages"]} if given["stages"] is not None else {}
    counts |= {f"--{key.replace('_', '-')}": len(given[key]) for key in ("gpu_bytes", "fixed_bytes", "reserve") if given[key] and len(given[key]) > 1}
    counts |= {f"--cut {','.join(map(str, cut))}": len(cut) for cut in given["cut"]}
    if not counts:
        raise ConfigError("--stages, --cut or a list of --gpu-bytes must say how many stages there are")
    if len(set(counts.values())) > 1:
        raise ConfigError("flags speak of different numbers of stages: " + ", ".join(f"{flag} of {count}" for flag, count in counts.items()))
    return next(iter(counts.values()))


def _placement(model: Model, given: dict[str, Any], stages: int) -> Placement:
    if (given["gpu_bytes"] is None) == (given["gpu"] is None):
        raise ConfigError("--gpu-bytes or --gpu must be given, and not both")
    budgets = per_stage("--gpu-bytes", given["gpu_bytes"] or (accelerator(given["gpu"] or "").bytes,), stages)
    fixed = per_stage("--fixed-bytes", given["fixed_bytes"] or (0,), stages)
    reserve = per_stage("--reserve", given["reserve"], stages)
    if reserve is None:
        raise ConfigError(
            "--reserve must be given for cuts that were never booted: bytes that each stage will keep back, as boots printed it (0 says that "
            "nothing is)")
    layer_bytes, note = _layer_bytes(model, given, given["tp"])
    return Placement(budgets=budgets or (), layer_bytes=layer_bytes, fixed=fixed or (), reserve=reserve, layer_note=note)


def _cut_of_report(report: Report, given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cut": list(report.deployment.cut or ()), "tokens": report.tokens, "pages": report.pages, "binding": f"stage {report.pool.binding}",
        "binding_stage": report.pool.binding, "capacities": [stage.capacity for stage in report.stages],
        "attention_layers": [stage.own.cost.attention for stage in report.stages],
        "recurrent_layers": [stage.own.cost.recurrent for stage in report.stages],
        "band_tokens": band_tokens(report.token_bytes, given["band"]),
    }
    if given["present_tokens"] is not None:
        against = compare(given["present_tokens"], report.tokens, given["noise_floor"])
        found |= {"change": against.change, "finding": against.finding}
    return found


def _size_lines(reports: Sequence[Report], chosen: Report, given: dict[str, Any], *, searched: bool) -> list[str]:
    rows = []
    for report in reports:
        cut = _cut_of_report(report, given)
        held = " ".join("any" if one is None else f"{one:,}" for one in cut["capacities"])
        said = str(compare(given["present_tokens"], report.tokens, given["noise_floor"])) if given["present_tokens"] is not None else ""
        rows.append((
            _named(cut["cut"]), f"{report.tokens:,}", f"+-{cut['band_tokens']:,}", cut["binding"], held,
            " ".join(map(str, cut["attention_layers"])), said))
    best = "the best cut" if searched else "the best of these cuts"
    said = f"{_named(chosen.deployment.cut or ())} is {best}: {chosen.tokens:,} tokens, bound by stage {chosen.pool.binding}"
    out = [
        f"{said}; never booted, and only as good as the reserve", "",
        *table(("cut", "tokens", f"for +-{given['band'] // MIB} MiB", "binds", "stages could hold", "attention", ""), rows, right={1, 2}),
    ]
    for stage in chosen.stages:
        own = stage.own
        out += ["", f"stage {own.number}: layers {own.layers.start} to {own.layers.stop - 1}, {own.token_bytes:,} B for a token", *items_table(stage.account)]
    return out


def _named(cut: Sequence[int]) -> str:
    return f"[{', '.join(map(str, cut))}]"


# -- cuts predicted from a boot ---------------------------------------------------------------------------------------


def _from_boot(model: Model, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Verify a boot, and predict the cuts that are named, or the best one where a reserve is given."""
    boot = Boot.from_dict(read_json(given["boot"]))
    unused = [f"--{key.replace('_', '-')}" for key in ("gpu_bytes", "gpu", "fixed_bytes", "checkpoint_bytes") if given[key] is not None]
    if unused:
        raise ConfigError(f"{', '.join(unused)} cannot be given with --boot, which says what a stage has")
    remarks = boot.verify()
    costs = LayerCosts(model, _widths(model, given), given["tp"], draft_tokens=given["draft_tokens"])
    layers = Layers(
        tuple(costs.of(range(n, n + 1)).attention for n in range(costs.layers)),
        tuple(costs.of(range(n, n + 1)).recurrent for n in range(costs.layers)))
    _check_cell(boot, costs)
    check_layers(boot, layers)
    forecasts = _forecasts(boot, layers, given)
    out = [f"boot {boot.name}: {_named(boot.cut)} holds together; {boot.tokens:,} tokens, bound by stage {boot.pool().binding}"]
    out += [f"note: {remark}" for remark in remarks]
    for number, stage in enumerate(boot.stages):
        capacity = boot.pool().capacities[number]
        held = "any number of" if capacity is None else f"{capacity:,}"
        layout = f"stage {number}: {stage.layers} layers, {stage.attention_layers} with attention, could hold {held} tokens"
        rest = f"rest {gib(stage.rest)} GiB, offered {gib(stage.available)}, reserve {gib(stage.reserve)}"
        out += ["", f"{layout}; {rest}", *items_table(stage.account)]
    if forecasts:
        out += ["", *(str(one) for one in forecasts)]
    return _boot_as_dict(boot, model, costs, forecasts, given), out


def _check_cell(boot: Boot, costs: LayerCosts) -> None:
    """Raise `ConfigError` unless the boot's cell is what the model and the types given come to."""
    whole = costs.all()
    if whole.token != boot.cell * whole.attention:
        raise ConfigError(
            f"boot {boot.name!r}: cell_bytes is {boot.cell:,}, and {whole.attention} attention layers of CONFIG take {whole.token:,} B a token, "
            f"{whole.token / whole.attention:,.1f} each: --tp or --kv-dtype are others")


def _forecasts(boot: Boot, layers: Layers, given: dict[str, Any]) -> list[Forecast]:
    cuts = [cut for cut in given["cut"] if tuple(cut) != boot.cut]
    reserve = per_stage("--reserve", given["reserve"], len(boot.stages))
    if reserve is None and not cuts:
        return []
    if given["layer_bytes"] is None:
        raise ConfigError("--layer-bytes must be given for a cut that was never booted: weights move with their layers")
    known = {"reserve": reserve, "layer_bytes": given["layer_bytes"], "band": given["band"], "noise_floor": given["noise_floor"]}
    if not given["cut"]:
        return [best_forecast(boot, layers, **known)]
    return [forecast(boot, layers, cut, **known) for cut in cuts]


def _boot_as_dict(boot: Boot, model: Model, costs: LayerCosts, forecasts: list[Forecast], given: dict[str, Any]) -> dict[str, Any]:
    """The best of what is known in the words of `kvsched size --json`, the boot's own figures, and every forecast."""
    best = max(forecasts, key=lambda one: one.tokens, default=None)
    binding = boot.pool().binding if best is None else best.binding
    tokens = boot.tokens if best is None else best.tokens
    pages = tokens // boot.page_size
    pool = boot.pool() if best is None or best.measured else best.predicted
    part = pool.stages[binding].layers
    context = min((one for one in (model.context, given["context_limit"]) if one is not None), default=None)
    return {
        "model_type": model.model_type, "cut": list(boot.cut if best is None else best.cut), "page_size": boot.page_size,
        "bytes_per_token_per_rank": pool.stages[binding].token_bytes, "tokens": tokens, "pages": pages, "context_limit": context,
        "max_servable_tokens": max_servable_tokens(pages, boot.page_size, context), "binding": f"stage {binding}", "binding_stage": binding,
        "state_bytes_per_request": given["slots_per_request"] * costs.of(part).slot,
        "items": [item.as_dict() for item in boot.stages[binding].account.items], "boot": {
            "name": boot.name, "cut": list(boot.cut), "tokens": boot.tokens, "binding_stage": boot.pool().binding,
            "capacities": list(boot.pool().capacities), "reserve_bytes": list(boot.reserves), "residual_bytes": list(boot.residuals()),
            "remarks": list(boot.verify()),
        },
        "cuts": [{
            "cut": list(one.cut), "tokens": one.tokens, "binding": f"stage {one.binding}", "binding_stage": one.binding,
            "measured": one.measured, "predicted_tokens": one.predicted.tokens, "capacities": list(one.predicted.capacities),
            "reserve_bytes": list(one.reserve), "band_bytes": one.band, "band_tokens": one.band_tokens,
            "caps": [attrs.asdict(cap) for cap in one.caps], "change": one.comparison.change, "finding": one.comparison.finding,
        } for one in forecasts],
    }
