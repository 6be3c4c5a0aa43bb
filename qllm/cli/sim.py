"""The commands `qllm sim`, `qllm plan` and `qllm calibrate`: policies on a virtual clock."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.cli.app import Threads, app, clean, engine_settings, print_table, quiet
from qllm.cli.settings import WithSettings
from qllm.errors import ConfigError

if TYPE_CHECKING:
    from qllm.config import EngineConfig
    from qllm.measure.variants import Variant
    from qllm.sim.capacity import Answer, Tried
    from qllm.sim.costs import CostFile
    from qllm.sim.experts import ExpertsOnDisk, Routing
    from qllm.sim.run import Simulated
    from qllm.types import Slo
    from qllm.workloads.capacity import Capacity
    from qllm.workloads.spec import RequestSpec

Model = Annotated[
    str | None,
    typer.Option(
        help="With --preset: 300m, 1m, qwen3-moe, mixtral, olmoe, a folder or a hub id. With "
        "--costs it must be the measured one."
    ),
]
Costs = Annotated[Path | None, typer.Option(help="A file that `qllm calibrate` wrote.")]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Computed costs: h100, h200, gh200, cpu, or a data sheet of your own, FILE.toml."
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="Names with commas between; with settings as NAME:KEY=VALUE, several values as "
        "KEY=A/B. See `qllm policies`."
    ),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="An engine setting, NAME=VALUE.")]
Seed = Annotated[int, typer.Option(help="Of the arrivals.")]


def _machine(
    model: str | None, costs: Path | None, preset: str | None, settings: list[str] | None
) -> "CostFile":
    from qllm.config import engine_config
    from qllm.sim.costs import CostFile
    from qllm.sim.presets import preset as computed

    if (costs is None) == (preset is None):
        raise ConfigError(
            "give --costs FILE (from `qllm calibrate`) or --preset h100, h200, gh200 or cpu, and "
            "not both"
        )
    if preset is not None:
        expert_weights = engine_config(engine_settings(settings)).expert_weights
        return computed(preset, model or "300m", expert_weights)
    assert costs is not None
    found = CostFile.read(costs)
    if model is not None and model != found.model:
        raise ConfigError(f"{costs} has the costs of {found.model!r}, not of {model!r}")
    return found


def _config(machine: "CostFile", settings: list[str] | None) -> "EngineConfig":
    from qllm.config import engine_config

    given = engine_settings(settings)
    room = dict.fromkeys(("max_kv_tokens", "prefix_cache_tokens"), machine.max_kv_tokens)
    return engine_config({**room, **given})


@app.command(cls=WithSettings)
@clean
def sim(
    workload: Annotated[str | None, typer.Option(help="A named workload, S1 to S15.")] = None,
    requests: Annotated[
        Path | None,
        typer.Option(help="A trace file instead: Azure, BurstGPT, Mooncake or our own."),
    ] = None,
    policy: Policy = "qllm2",
    model: Model = None,
    costs: Costs = None,
    preset: Preset = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Length of the window; a trace file is served to its end without it."),
    ] = None,
    seed: Seed = 0,
    load: Annotated[
        float | None, typer.Option(help="Of the workload: LS rate over LS capacity.")
    ] = None,
    rate_scale: Annotated[float, typer.Option(help="Factor on the rate of a trace file.")] = 1.0,
    be_share: Annotated[
        float | None, typer.Option(help="Part of a trace file's requests that is BE.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most requests of a trace file.")] = None,
    slo: Annotated[
        str | None, typer.Option(help="Targets of LS requests, like ttft=500ms,tpot=50ms.")
    ] = None,
    setting: Settings = None,
    expert_skew: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="With --set max_expert_bytes: skew of the router; without it that of the costs.",
        ),
    ] = None,
    routing: Annotated[
        Path | None,
        typer.Option(help="With --set max_expert_bytes: a routing trace, FILE.npz, instead."),
    ] = None,
    engines: Annotated[
        int, typer.Option(min=1, help="Equal engines; the named workload is for all together.")
    ] = 1,
    route: Annotated[
        str | None,
        typer.Option(
            help="Which engine gets a request, several with commas between: class, length, "
            "prefix, least, round-robin, module:function."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for figure and traces.")] = None,
) -> None:
    """Serve a workload on a virtual clock under each policy: tables, a figure, traces."""
    from qllm.config import parse_slo
    from qllm.measure.variants import parse_variants
    from qllm.sim import outcome

    variants = parse_variants(policy)
    machine = _machine(model, costs, preset, setting)
    config = _config(machine, setting)
    targets = None if slo is None else parse_slo(slo)
    if route is not None and engines == 1:
        raise ConfigError(f"--route {route} chooses among engines: give --engines a number above 1")
    if (workload is None) == (requests is None):
        raise ConfigError("give --workload S1 to S15 or --requests FILE, and not both")
    config, disk = _apart(machine, config, engines, (expert_skew, routing), seed)
    if requests is not None:
        from qllm.workloads.files import read_requests

        specs = read_requests(
            requests,
            be_share=be_share,
            seed=seed,
            rate_scale=rate_scale,
            limit=limit,
            seconds=None if seconds is None else seconds * rate_scale,
        )
    else:
        assert workload is not None
        seconds = seconds or 60.0
        capacity = machine.capacity(config).times(engines)
        specs = _named(workload, capacity, machine, config, seconds, seed, load)
    if targets is not None:
        specs = _with_slo(specs, targets)
    _say_workload(machine, specs, seconds)
    runs = {}
    for label, serve in _arms(variants, engines, route or "class"):
        runs[label] = run = serve(specs, machine, config=config, seconds=seconds, **disk)
        _say_run(label, run)
    print_table(outcome.HEAD, outcome.rows(runs, machine, targets))
    if out is not None:
        for what, path in outcome.write_files(out, runs).items():
            typer.echo(f"{what:<10} {path}")


def _say_run(label: str, run: "Simulated") -> None:
    """Print what a run did."""
    from qllm.cli.trace import print_summary

    typer.echo(f"\n{label}: {run.cpu_s:.1f} s of CPU for {run.window_s:.1f} virtual s")
    print_summary(run.summary(), {})
    for name, read in run.experts.items():
        typer.echo(
            f"{name}: {read['loads']:,} of {read['uses']:,} uses of experts read, "
            f"{read['bytes'] / 1e9:,.2f} GB; frames waited {read['waits_ms'] / 1e3:,.2f} s"
        )
    if run.refused:
        typer.echo(f"{run.refused} requests are longer than the engine holds: refused")


def _apart(
    machine: "CostFile",
    config: "EngineConfig",
    engines: int,
    routed: tuple[float | None, Path | None],
    seed: int,
) -> "tuple[EngineConfig, dict[str, ExpertsOnDisk]]":
    """Return the settings without a disk, and the experts on the measured disk of `expert_dir`.

    Args:
        machine: Costs of the model.
        config: Settings with or without a disk.
        engines: Number of engines.
        routed: Skew of the router and a routing trace, at most one of them.
        seed: Seed of a drawn routing.
    """
    from qllm.measure.disk_rate import disk_rate
    from qllm.sim.experts import ExpertsOnDisk

    most, folder, num_bytes = config.max_expert_bytes, config.expert_dir, machine.expert_bytes
    if most is None or folder is None or engines > 1:
        if routed != (None, None):
            raise ConfigError(
                "--expert-skew and --routing are for experts on a disk: give --set "
                "max_expert_bytes=SIZE --set expert_dir=FOLDER, and one engine"
            )
        return config, {}
    if num_bytes == 0:
        raise ConfigError(
            f"max_expert_bytes={most}: the costs of {machine.model!r} have no experts; leave "
            "max_expert_bytes and expert_dir out"
        )
    what, routing = _routing(machine, *routed, seed)
    disk = ExpertsOnDisk(
        max_bytes=int(most), expert_bytes=num_bytes, bytes_per_s=1, routing=routing
    )
    disk.placement(machine.model_shape())  # refused before the disk is measured
    rate = disk_rate(Path(folder), num_bytes)
    typer.echo(
        f"experts of {num_bytes:,} bytes on a disk that reads {rate.bytes_per_s / 1e9:.2f} GB/s"
        f"{'' if rate.is_direct else ' out of the page cache'}; {what}"
    )
    without = replace(config, max_expert_bytes=None, expert_dir=None)
    return without, {"disk": replace(disk, bytes_per_s=rate.bytes_per_s)}


def _routing(
    machine: "CostFile", skew: float | None, trace: Path | None, seed: int
) -> "tuple[str, Routing]":
    """Return the routing of a simulation, and what it is."""
    from qllm.sim.experts import SkewedRouting, TracedRouting

    shape = machine.model_shape()
    if trace is not None:
        if skew is not None:
            raise ConfigError(f"give --routing {trace} or --expert-skew {skew:g}, and not both")
        return f"routing of {trace}", TracedRouting.read(trace, shape)
    skew = machine.sim_costs().skew if skew is None else skew
    return f"skew of the router {skew:g}", SkewedRouting(shape, skew, seed)


def _arms(
    variants: "list[Variant]", engines: int, route: str
) -> "list[tuple[str, Callable[..., Simulated]]]":
    """Return the runs to compare: one per policy and, with several engines, route."""
    from qllm.fleet.routes import load_route
    from qllm.sim.fleet import simulate_fleet
    from qllm.sim.run import simulate

    def one(variant: "Variant", specs: Any, machine: Any, **how: Any) -> "Simulated":
        return simulate(specs, variant.make(), machine, **how)

    def several(variant: "Variant", name: str, specs: Any, machine: Any, **how: Any) -> "Simulated":
        return simulate_fleet(specs, variant.make(), machine, engines=engines, route=name, **how)

    if engines == 1:
        return [(variant.label, partial(one, variant)) for variant in variants]
    names = [name.strip() for name in route.split(",") if name.strip()]
    for name in names:
        load_route(name)
    return [(f"{v.label}, {name}", partial(several, v, name)) for v in variants for name in names]


def _named(
    name: str,
    capacity: "Capacity",
    machine: "CostFile",
    config: "EngineConfig",
    seconds: float,
    seed: int,
    load: float | None,
) -> "list[RequestSpec]":
    """Return a named workload, scaled to the machine's speed and memory; print what it is."""
    from qllm.workloads.generators import Workload

    workload = Workload(
        name=name,
        seconds=seconds,
        capacity=capacity,
        load=load,
        max_len=machine.model_shape().longest(config.pool_tokens),
    )
    typer.echo(f"{name}: {workload.what}")
    return workload.requests(seed)


def _with_slo(specs: "list[RequestSpec]", slo: "Slo") -> "list[RequestSpec]":
    from qllm.types import Priority

    return [replace(s, slo=slo) if s.priority <= Priority.LS else s for s in specs]


def _say_workload(machine: "CostFile", specs: "list[RequestSpec]", seconds: float | None) -> None:
    from qllm.record.metrics import class_name
    from qllm.workloads.generators import offered_rates

    length_s = seconds or max(1e-9, max(s.at_s for s in specs))
    rates = ", ".join(
        f"{class_name(p)} {rate:.3g}/s" for p, rate in offered_rates(specs, length_s).items()
    )
    at_once = sum(s.at_s == 0 for s in specs)
    typer.echo(machine.title + (f" ({machine.note})" if machine.note else ""))
    typer.echo(f"{len(specs)} requests, {at_once} at once; offered after that: {rates}")


@app.command(cls=WithSettings)
@clean
def plan(
    slo: Annotated[str, typer.Option(help="Targets of LS requests, like ttft=500ms,tpot=50ms.")],
    ls_rate: Annotated[
        float | None, typer.Option(help="LS requests per second; by default those of --requests.")
    ] = None,
    policy: Policy = "qllm2,priority,ls-first,fcfs",
    model: Model = None,
    costs: Costs = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Computed costs, several with commas between: h100, h200, gh200, cpu, or data "
            "sheets of your own, FILE.toml."
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="The named workload whose lengths are taken.")
    ] = "S2",
    requests: Annotated[
        Path | None,
        typer.Option(help="A trace file instead: Azure, BurstGPT, Mooncake or our own."),
    ] = None,
    be_share: Annotated[
        float | None, typer.Option(help="Part of a trace file's requests that is BE.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most requests of a trace file.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Length of every run; by default the trace's, or 300 LS requests."),
    ] = None,
    seed: Seed = 0,
    setting: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the figure.")] = None,
) -> None:
    """Print how much BE throughput fits next to LS under its targets, policy by policy."""
    from qllm.config import parse_slo
    from qllm.measure.variants import parse_variants
    from qllm.sim.capacity import Question, harvest, why

    variants = parse_variants(policy)
    if len(variants) == 0:
        raise ConfigError("give --policy at least one name")
    machines = [_machine(model, costs, name, setting) for name in _names(preset)]
    question = Question(
        slo=parse_slo(slo),
        ls_rate=ls_rate,
        workload=workload,
        requests=_trace(requests, be_share, seed, limit),
        seconds=seconds,
        seed=seed,
    )
    typer.echo(
        f"{question.title} under {slo}, {question.window_s:g} s per run, seed {seed}; a load is "
        "carried if at least 99 % of the LS requests meet both targets"
    )
    for number, machine in enumerate(machines):
        typer.echo(f"\n{machine.title}" + (f" ({machine.note})" if machine.note else ""))
        answers = harvest(question, machine, variants, _config(machine, setting), _say_tried)
        print_table(_PLAN_HEAD, [_plan_row(answer) for answer in answers])
        typer.echo(why(answers, question.slo))
        if out is not None:
            from qllm.sim.figures import plan_figure

            out.mkdir(parents=True, exist_ok=True)
            path = out / ("plan.png" if len(machines) == 1 else f"plan-{number + 1}.png")
            plan_figure(answers, question, path, machine.title)
            typer.echo(f"figure     {path}")


def _names(presets: str | None) -> list[str | None]:
    """Split a comma-separated list of presets; return [None] without one (costs from a file)."""
    if presets is None:
        return [None]
    return [name.strip() for name in presets.split(",") if name.strip()] or [presets]


def _trace(
    path: Path | None, be_share: float | None, seed: int, limit: int | None
) -> "tuple[RequestSpec, ...]":
    if path is None:
        if be_share is not None or limit is not None:
            raise ConfigError("--be-share and --limit go with --requests, a trace file")
        return ()
    from qllm.workloads.files import read_requests

    return tuple(read_requests(path, be_share=be_share, seed=seed, limit=limit))


_PLAN_HEAD = (
    "policy",
    "BE tokens/s, in + out",
    "BE load",
    "SLO met",
    "LS TTFT p50 / p99, ms",
    "LS TPOT p50 / p99, ms",
    "with a full backlog",
)


def _load(be_rate: float | None) -> str:
    return "full backlog" if be_rate is None else f"{be_rate:.3g}/s"


def _say_tried(label: str, tried: "Tried") -> None:
    found = tried.outcome
    typer.echo(
        f"  {label}, BE {_load(tried.be_rate)}: SLO met {found.attainment or 0:.1%}, "
        f"{found.be_per_s:,.0f} BE tokens/s",
        err=True,
    )


def _plan_row(answer: "Answer") -> tuple[str, ...]:
    from qllm.sim.outcome import pair

    best, full = answer.best, answer.tried[-1].outcome
    backlog = f"{full.attainment or 0:.1%} met, {full.be_per_s:,.0f} tokens/s"
    if best is None:
        return answer.label, "none", "LS alone misses", "-", "-", "-", backlog
    found = best.outcome
    return (
        answer.label,
        f"{found.be_prompt_per_s:,.0f} + {found.be_output_per_s:,.0f}",
        _load(best.be_rate),
        f"{found.attainment or 0:.1%}",
        pair(found.ls_ttft_p50, found.ls_ttft_p99),
        pair(found.ls_tpot_p50, found.ls_tpot_p99),
        backlog,
    )


@app.command(cls=WithSettings)
@clean
def calibrate(
    model: Annotated[
        str, typer.Argument(help="300m or 1m (random weights), an alias, a folder or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="The cost file to write.")] = Path("costs.json"),
    threads: Threads = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often every load is measured.")] = 2,
    setting: Settings = None,
    busy: Annotated[
        bool, typer.Option("--busy", help="Measure although others use the machine.")
    ] = False,
) -> None:
    """Measure the costs of a model on this machine, for `qllm sim` and `qllm plan`."""
    quiet()
    from qllm.config import engine_config
    from qllm.sim.calibrate import LOADS, refuse_busy
    from qllm.sim.calibrate import calibrate as measure

    config = engine_config(engine_settings(setting))
    if not busy:
        refuse_busy()
    with typer.progressbar(length=len(LOADS) * rounds, label="loads") as bar:
        found = measure(
            model, threads=threads, rounds=rounds, config=config, on_load=lambda _: bar.update(1)
        )
    found.write(out)
    typer.echo(found.title + f" ({found.note})")
    print_table(
        ("op", "samples", "error p50 / p90, %", "of the sum, %"),
        (
            (
                kind,
                str(e.samples),
                f"{e.p50_percent:g} / {e.p90_percent:g}",
                f"{e.total_percent:+g}",
            )
            for kind, e in found.fit.items()
        ),
    )
    capacity = found.capacity(config)
    typer.echo(
        f"{capacity.prefill_tokens_per_s:,.0f} prompt tokens/s, "
        f"{capacity.output_tokens_per_s:,.0f} output tokens/s with {capacity.max_num_seqs} seats"
    )
    typer.echo(f"costs      {out}")
