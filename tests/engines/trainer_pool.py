"""Real trainer ranks in processes of their own, which stay for many tests: importing Megatron takes long."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving import HOST, make_plan

from slime_hpc.device import get_device
from slime_hpc.plan import JobPlan
from slime_hpc.trainer.hf_weights import gather_weights
from slime_hpc.trainer.ranks import TrainerRank
from slime_hpc.types import LoadedState, ShardReport, TrainBatch

ANSWER_DEADLINE_S = 120.0
Weights = dict[str, np.ndarray[Any, Any]]


class Pool:
    """``size`` processes that each run the same function; the first parameter it gets is its rank."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """Results of ranks 0 to ``ranks`` - 1; the first exception is raised."""
        for pipe in self._pipes[:ranks]:
            pipe.send((function, args))
        results = [self._answer(rank) for rank in range(ranks)]
        for ok, value in results:
            assert ok, value
        return [value for _, value in results]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        assert self._pipes[rank].poll(ANSWER_DEADLINE_S), f"no answer of rank {rank} in {ANSWER_DEADLINE_S} s"
        answer: tuple[bool, Any] = self._pipes[rank].recv()
        return answer

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    get_device("cpu").prepare_trainer()  # all ranks at once, instead of one waiting for the other's imports
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(rank, *args)))
        except Exception:  # noqa: BLE001 - the test that asked gets the traceback
            pipe.send((False, traceback.format_exc()))


class Held:
    """The trainer rank of this process."""

    trainer: TrainerRank


def trainer_plan(
    run_dir: Path,
    model: Path,
    *,
    temperature: float = 1.0,
    lr: float = 1e-6,
    max_tokens: int = 8192,
    schedule: dict[str, Any] | None = None,
    **megatron: Any,
) -> JobPlan:
    plan = make_plan(run_dir, model)
    spec = plan.spec.model_copy(
        update={
            "trainer": plan.spec.trainer.model_copy(update={"megatron": megatron, "max_tokens_per_gpu": max_tokens}),
            "sampling": plan.spec.sampling.model_copy(update={"rollout_temperature": temperature}),
            "num_rollout": 10,
            "algorithm": plan.spec.algorithm.model_copy(update={"lr": lr, **(schedule or {})}),
        }
    )
    return plan.model_copy(update={"spec": spec})


def create(rank: int, plan: JobPlan, world_size: int) -> tuple[str, int] | None:
    Held.trainer = TrainerRank(plan, rank, world_size)
    return Held.trainer.rendezvous(HOST) if rank == 0 else None


def setup(rank: int, host: str, port: int) -> None:
    Held.trainer.setup(host, port)


def shutdown(rank: int) -> None:
    Held.trainer.shutdown()


def logits(rank: int, tokens: list[list[int]]) -> np.ndarray[Any, Any]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    ids = torch.tensor(tokens)
    with torch.no_grad():
        parts = Held.trainer._model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
    return gather_from_tensor_model_parallel_region(parts).numpy()  # type: ignore[no-any-return]


def weights(rank: int) -> Weights:
    return {name: tensor.numpy().copy() for name, tensor in Held.trainer.named_hf_tensors()}


def metas(rank: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(m.name, m.dtype, m.shape) for m in Held.trainer.weight_metas()]


def train(rank: int, batch: TrainBatch) -> dict[str, float]:
    return Held.trainer.train(batch)


def save(rank: int, directory: Path) -> list[ShardReport]:
    return Held.trainer.save(directory)


def load(rank: int, directory: Path) -> LoadedState:
    loaded = Held.trainer.load(directory)
    assert loaded.step == Held.trainer.step
    return loaded


def moments(rank: int) -> Weights:
    """Adam's, whole, by their kind and the HF name of their parameter."""
    from megatron.core import parallel_state

    trainer = Held.trainer
    group = parallel_state.get_tensor_model_parallel_group()
    found: Weights = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in trainer._model.named_parameters()}
            fill_with_moments(kind)
            whole = gather_weights(trainer._model, trainer._layouts, group)
            found |= {f"{kind} {name}": tensor.numpy().copy() for name, tensor in whole}
            for name, p in trainer._model.named_parameters():
                p.copy_(kept[name])
    return found


def draw(rank: int) -> list[float]:
    """Random numbers of the default generator and of the model-parallel one."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = torch.rand(2).tolist()
    return [*torch.rand(2).tolist(), *forked]


def export(rank: int, directory: Path) -> None:
    Held.trainer.export_hf(directory)


def optimizer_settings(rank: int) -> dict[str, Any]:
    config = Held.trainer._optimizer.config
    names = ("lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")
    return {
        **{name: getattr(config, name) for name in names},
        "tensor_model_parallel_size": Held.trainer._model.config.tensor_model_parallel_size,
    }


def fill_with_moments(kind: str) -> None:
    """Put them where the weights are: into a rank's own share of the DDP buffer, which is then gathered."""
    trainer = Held.trainer
    (optimizer,) = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])
    state = optimizer.optimizer.state
    if not trainer._ddp.ddp_config.use_distributed_optimizer:
        for p in trainer._model.parameters():
            p.copy_(state[p][kind])
        return
    for shards in optimizer.shard_fp32_groups:
        for shard in shards:
            shard.copy_(state[shard][kind])
    trainer._ddp.start_param_sync()


def packed_and_padded(rank: int, sequences: list[list[int]]) -> tuple[Weights, Weights]:
    """Log-probs of next tokens, and gradients of a sum of them, by name; both ways."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from slime_hpc.trainer.step import next_token_log_probs

    model = Held.trainer._model
    tensors = [torch.tensor(sequence) for sequence in sequences]
    rows = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    counts = (positions < torch.tensor([[len(tensor) - 1] for tensor in tensors])).float()
    packed = next_token_log_probs(model, tensors, 0.7)
    padded = -vocab_parallel_cross_entropy(model(rows, positions, None) / 0.7, rows.roll(-1, dims=1))
    return _with_gradients(packed * counts), _with_gradients(padded * counts)


def _with_gradients(log_probs: torch.Tensor) -> Weights:
    weighted = log_probs * torch.linspace(-1, 2, log_probs.numel()).view_as(log_probs)
    named = dict(Held.trainer._model.named_parameters())
    gradients = torch.autograd.grad(weighted.sum() / 10, list(named.values()))
    return {"log_probs": log_probs.detach().numpy()} | {n: g.numpy() for n, g in zip(named, gradients, strict=True)}


def hyperparameters(rank: int) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in Held.trainer._optimizer.param_groups]


def configs(rank: int) -> dict[str, dict[str, Any]]:
    """Plain fields of the three configs that the trainer was built with."""
    built = {
        "transformer": Held.trainer._model.config,
        "optimizer": Held.trainer._optimizer.config,
        "ddp": Held.trainer._ddp.ddp_config,
    }
    plain = bool | int | float | str | list | None
    return {name: {k: v for k, v in vars(c).items() if isinstance(v, plain)} for name, c in built.items()}
