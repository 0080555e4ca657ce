"""`inweave bench cluster`: a simulation of runners with the worker's scheduler, with measured service times."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.bench_report import measuring, refuse_unused
from inweave.errors import ConfigError, amount

if TYPE_CHECKING:
    from inweave.bench.report import BenchRow
    from inweave.serve.scheduler.workload import Case, Outcome

JOBS_EACH = 200


def cluster(
    context: typer.Context,
    runners: Annotated[str, typer.Option("--runners", help="Numbers of runners, such as 1,8,100.")] = "1,8,100",
    load: Annotated[float, typer.Option("--load", min=0.01, help="Arrivals, as a share of what runners can do.")] = 0.8,
    jobs: Annotated[int | None, typer.Option(
        "--jobs", min=30, help="Jobs of each simulation.", show_default="200 per runner, at least 3000")] = None,
    loras: Annotated[int, typer.Option("--loras", min=1, help="LoRAs that jobs choose from.")] = 10_000,
    exponent: Annotated[float, typer.Option("--exponent", min=0.0, help="Of Zipf's law; 0: all are equal.")] = 1.0,
    capacity: Annotated[int, typer.Option("--capacity", min=1, help="LoRAs in the memory of a runner.")] = 100,
    run_seconds: Annotated[str | None, typer.Option(
        "--run-seconds", metavar="SECONDS,...", help="Run times of jobs without their start.",
        show_default="measured on inweave/emoji")] = None,
    read_seconds: Annotated[float | None, typer.Option(
        "--read-seconds", min=0.0, help="Reading a LoRA.", show_default="measured, or 0.1")] = None,
    load_seconds: Annotated[float | None, typer.Option(
        "--load-seconds", min=0.0, help="Loading the model.", show_default="measured, or 10")] = None,
    node_hours: Annotated[float | None, typer.Option(
        "--node-hours", help="Mean hours until a node fails.", show_default="never")] = None,
    runners_per_node: Annotated[int, typer.Option("--runners-per-node", min=1, help="Runners of a node.")] = 8,
    lease_seconds: Annotated[float, typer.Option(
        "--lease-seconds", min=0.0, help="Until a lost node is noticed.")] = 10.0,
    restart_seconds: Annotated[float, typer.Option(
        "--restart-seconds", min=0.0, help="Until the runners of a lost node are back.")] = 30.0,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, choices and failures.")] = 0,
    report: Annotated[str | None, typer.Option(
        "--json", metavar="FILE", help="Write the figures to this file as JSON; -: print JSON instead of the table.",
        show_default="none")] = None,
) -> None:  # fmt: skip
    """Simulate 1 to 1,000 runners with the scheduler of `inweave serve`: throughput, LoRAs in memory, waiting times.

    Example: inweave bench cluster --runners 8,100 --run-seconds 3 --read-seconds 0.15 --node-hours 24
    """
    if node_hours is None:
        refuse_unused(context, "without --node-hours", "runners_per_node", "lease_seconds", "restart_seconds")
    with measuring("cluster", context, None, report) as bench:
        from inweave.bench.service_times import measure_service_times
        from inweave.serve.scheduler.workload import Case

        counts = [int(each) for each in _numbers("--runners", runners)]
        if run_seconds is None:
            times = measure_service_times(bench.device, bench.progress)
            runs, read, model = times.runs, times.read, times.load
        else:
            runs, read, model = tuple(_numbers("--run-seconds", run_seconds)), 0.1, 10.0
        base = Case(
            load=load, loras=loras, exponent=exponent, capacity=capacity, run_seconds=runs,
            read_seconds=read if read_seconds is None else read_seconds,
            load_seconds=model if load_seconds is None else load_seconds, node_hours=node_hours,
            runners_per_node=runners_per_node, lease_seconds=lease_seconds, restart_seconds=restart_seconds, seed=seed,
        )  # fmt: skip
        rows = []
        for count in counts:
            bench.progress(amount(int(count), "runner"))
            rows.append(_row(replace(base, runners=count, jobs=jobs or max(3000, JOBS_EACH * count))))
        bench.rows = rows
        measured = "measured on inweave/emoji" if run_seconds is None else "as passed"
        bench.notes = [
            f"times {measured}: a job {mean(runs):.3g} s, reading a LoRA {base.read_seconds:.3g} s, loading the model "
            f"{base.load_seconds:.3g} s",
            "ideal: the same arrivals and run times on runners that need no time to start and never fail",
        ]


def _row(case: Case) -> BenchRow:
    from inweave.bench.report import BenchRow
    from inweave.serve.scheduler.simulation import simulate
    from inweave.serve.scheduler.workload import arrivals, ideal_outcome

    jobs = arrivals(case)
    outcome, ideal = simulate(case, jobs), ideal_outcome(case, jobs)
    details: dict[str, float | str | None] = {
        "ideal": ideal.throughput,
        "of the ideal": f"{outcome.throughput / ideal.throughput:.1%}",
        "LoRA in memory": f"{outcome.hit_rate:.1%}",
        "time for starts": f"{outcome.overhead / max(outcome.busy, 1e-9):.2%}",
        **{f"wait p{percent}, s": outcome.wait(percent) for percent in (50, 95, 99)},
        "ideal p99, s": ideal.wait(99),
    }
    name = f"{amount(case.runners, 'runner')}, {amount(case.loras, 'LoRA')}, {case.load:.0%} load"
    if case.node_hours is not None:
        name += f", a node fails every {case.node_hours:g} hours"
        details |= _failures(outcome)
    return BenchRow(name, "images/s", outcome.throughput, details=details)


def _failures(outcome: Outcome) -> dict[str, float | str | None]:
    return {
        "nodes lost": outcome.failures, "jobs run again": outcome.reruns, "jobs lost": outcome.lost_jobs,
        "runner-seconds per lost node": outcome.node_cost,
    }  # fmt: skip


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if min(numbers) <= 0 or (option == "--runners" and any(each != int(each) for each in numbers)):
        raise ConfigError(f"{option} {text}: positive numbers, separated by commas, are needed, such as 1,8")
    return numbers
