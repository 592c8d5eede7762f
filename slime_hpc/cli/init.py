"""``slime-hpc init``: a profile to start from."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path("profile.yaml"),
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="A cluster profile's name, or its path.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the run.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory of the model to train.", show_default=False)
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="File with the prompts.", show_default=False)] = None,
) -> None:
    """Write a profile to start from, with a comment a line, and say what is left to fill in."""
    from slime_hpc.errors import UserError
    from slime_hpc.spec.load import is_cluster_file, load_cluster
    from slime_hpc.spec.template import find_placeholders, profile_template
    from slime_hpc.spec.yaml_tree import parse_yaml

    if file.is_dir():
        raise UserError(f"{file} is a directory; name a file in it, such as {file / 'profile.yaml'}")
    if cluster is not None and is_cluster_file(cluster):
        cluster = _seen_from(file.parent, cluster)
    text = profile_template(
        name=name,
        cluster=cluster,
        site=None if cluster is None else load_cluster(cluster, file.parent),
        model=None if model is None else _seen_from(file.parent, model),
        data=None if data is None else _seen_from(file.parent, data),
    )
    try:
        with open(file, "x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError as error:
        raise UserError(f"{file} is there already, and was left as it is; name another file") from error
    left = [finding.path for finding in find_placeholders(parse_yaml(text, str(file)))]
    open_ = f"; to be filled in: {', '.join(left)}" if left else ""
    path = shlex.quote(str(file))
    typer.echo(
        f"wrote {file}{open_}. Then:\n"
        f"  slime-hpc plan {path}      # checks every key, shows the job and what it may cost\n"
        f"  slime-hpc submit {path}    # --watch looks on to the end"
    )


def _seen_from(directory: Path, path: str) -> str:
    """A path given at the shell, as a profile in ``directory`` has to write it."""
    if path.startswith(("/", "~", "$")):
        return path
    return os.path.relpath(path, directory)
