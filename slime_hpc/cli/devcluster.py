"""``slime-hpc devcluster``: a real Slurm on this machine, for trying things without a supercomputer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slime_hpc.devcluster import DevCluster, Status

app = typer.Typer(no_args_is_help=True, help="A real Slurm on this machine, under one directory.")

Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        envvar="SLIME_HPC_DEVCLUSTER",
        help="Where it lives.",
        show_default="$XDG_STATE_HOME/slime-hpc/devcluster",
        readable=False,  # our own refusal names the next step
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def up(
    dir: Dir = None,
    train_nodes: Annotated[int, typer.Option(help="Nodes of partition train.")] = 2,
    rollout_nodes: Annotated[int, typer.Option(help="Nodes of partition rollout.")] = 2,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs declared on each node; they need not exist.")] = 4,
    cpus_per_node: Annotated[int, typer.Option(help="CPUs declared on each node; they need not exist.")] = 8,
    accounting: Annotated[bool, typer.Option(help="Run slurmdbd and its database, so that sacct works.")] = True,
    netns: Annotated[bool, typer.Option(help="Give each node a network namespace; takes root.")] = True,
    json: Json = False,
) -> None:
    """Start it, or start again what has died of it; changes nothing if it is up."""
    from slime_hpc.devcluster import Shape

    shape = Shape(train_nodes, rollout_nodes, gpus_per_node, cpus_per_node, accounting, netns)
    status = _devcluster(dir).up(shape)
    _report(status, json)
    if not json:
        option = f" --dir {status.dir}" if dir is not None else ""
        typer.echo(f'\nPoint this shell at it:  eval "$(slime-hpc devcluster env{option})"')


@app.command()
def down(dir: Dir = None) -> None:
    """Cancel its jobs, stop it and remove all of it but the logs."""
    cluster = _devcluster(dir)
    typer.echo(f"down; logs are in {cluster.layout.log}" if cluster.down() else f"nothing is up in {cluster.root}")


@app.command()
def status(dir: Dir = None, json: Json = False) -> None:
    """Show daemons, nodes and partitions, and whether it is up, partial or down."""
    _report(_devcluster(dir).status(), json)


@app.command()
def env(dir: Dir = None) -> None:
    """Print the shell line that points Slurm's commands at it."""
    import shlex

    for name, value in _devcluster(dir).client_env().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _devcluster(dir: Path | None) -> DevCluster:
    from slime_hpc.devcluster import DevCluster, default_dir

    return DevCluster(dir or default_dir(), say=lambda line: typer.echo(line, err=True))


def _report(status: Status, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(status.to_json(), indent=2))
        return
    typer.echo(f"devcluster in {status.dir}: {status.state}")
    if status.shape is not None:
        _print_tables(status)


def _print_tables(status: Status) -> None:
    from rich.console import Console
    from rich.table import Table

    assert status.shape is not None
    nodes = Table("node", "partition", "address", "state", "CPUs", "GPUs", box=None)
    for node in status.nodes:
        sizes = str(status.shape.cpus_per_node), str(status.shape.gpus_per_node)
        nodes.add_row(node.name, node.partition, node.address, node.state or "no answer", *sizes)
    daemons = Table("daemon", "pid", "", box=None)
    for daemon in status.daemons:
        daemons.add_row(daemon.name, str(daemon.pid or "-"), "alive" if daemon.alive else "dead")
    console = Console()
    console.print(status.note, style="dim", soft_wrap=True)
    console.print(nodes)
    console.print(daemons)
