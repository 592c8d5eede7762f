"""A profile to start from, and what it leaves to be filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from slime_hpc.errors import Finding, ProfileError
from slime_hpc.spec.cluster import ClusterProfile
from slime_hpc.spec.yaml_tree import KeyPath, Tree, parse_value

TEMPLATE = """\
# What stands as <fill in …> is yours to say. `slime-hpc plan` names what is left of it, and checks all the rest.
name: {name}  # of the run and its jobs, such as qwen3-math
cluster: {cluster}  # devcluster, or the path of a profile of your own
# account: NAME  # that jobs are charged to; left out: your default
run_dir: {run_dir}  # on a file system that all nodes see
time_limit: 4:00:00  # of one job; `slime-hpc resume` goes on in another
num_rollout: 100  # rounds of generate, reward, train, sync weights

# environment:  # what makes Python with the engines available on a node
#   setup: [source /path/to/venv/bin/activate]

model:
  hf_checkpoint: {model}  # with config.json, safetensors and tokenizer

trainer:  # Megatron-core
  partition: {trainer}
  nodes: 1
  # gpus_per_node: 4  # left out: as many as the cluster profile says
rollout:  # SGLang
  partition: {rollout}
  nodes: 1
  # gpus_per_node: 4  # an engine each

data:
  prompt_data: {data}  # JSONL or .parquet, a prompt a row
  input_key: input  # where the prompt stands in a row
  label_key: label  # where the answer stands that rm_type math compares with
  apply_chat_template: true  # false for a model without a chat template
sampling:
  rollout_batch_size: 8  # prompts a round
  n_samples_per_prompt: 8  # GRPO compares these with each other
  rollout_max_response_len: 512  # tokens; a response that reaches them is cut
reward:
  rm_type: math  # or custom_rm_path: reward.grade, from reward.py beside this file
algorithm:
  lr: 1e-6
checkpoint:
  interval: 10  # rounds; the last is always saved
"""
COMMENT_COLUMN = 40

_PLACEHOLDER = re.compile(r"<fill in (?P<what>[^<>]+)>")


def profile_template(
    *,
    name: str | None = None,
    cluster: str | None = None,
    site: ClusterProfile | None = None,
    model: str | None = None,
    data: str | None = None,
) -> str:
    """The text of a profile.yaml. ``site`` is the cluster profile that ``cluster`` names; what is None is left open."""
    text = TEMPLATE.format(
        name=_value(name, "a name"),
        cluster=_value(cluster, "a cluster profile"),
        run_dir=_value(name and f"runs/{name}", "a new directory"),
        model=_value(model, "a directory"),
        trainer=_partition("trainer", site),
        rollout=_partition("rollout", site),
        data=_value(data, "a file"),
    )
    return "".join(_line(line) + "\n" for line in text.splitlines())


def _line(line: str) -> str:
    """With its comment below those of other lines."""
    text, mark, comment = line.rpartition("  # ")
    return f"{text:<{COMMENT_COLUMN - 1}} # {comment}" if mark else line


def _value(given: str | None, what: str) -> str:
    return f"<fill in {what}>" if given is None else _scalar(given)


def _scalar(text: str) -> str:
    """In quotes only where it would otherwise be read as something else."""
    try:
        is_plain = parse_value(text, "") == text
    except ProfileError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _partition(role: str, site: ClusterProfile | None) -> str:
    """The cluster's only one, or the one that is called as the role is; else to be filled in."""
    names = list(site.partitions) if site else []
    fitting = names if len(names) == 1 else [name for name in names if role.startswith(name)]
    if fitting:
        return _scalar(fitting[0])
    return _value(None, f"one of {', '.join(names)}" if names else "a partition")


def find_placeholders(tree: Tree) -> list[Finding]:
    """What a profile made by ``slime-hpc init`` still leaves open."""
    return [
        Finding(".".join(path), f"is still to be filled in, with {what}", tree.where(path))
        for path, what in _placeholders(tree.values, ())
    ]


def _placeholders(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _placeholders(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _placeholders(item, (*path, str(i)))
    elif isinstance(value, str) and (found := _PLACEHOLDER.fullmatch(value)):
        yield path, found["what"]
