"""One GRPO step: log-probs of the samples under the policy, loss, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime_hpc.algorithm import policy_loss, sum_of_sample_means
from slime_hpc.spec.run import Algorithm
from slime_hpc.trainer.packing import micro_batches
from slime_hpc.types import TrainBatch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer


@dataclass(frozen=True)
class Rectangle:
    """Samples padded to one length. Column t of all but ``tokens`` belongs to the prediction of token t+1."""

    tokens: Tensor
    """[samples, length]"""
    masks: Tensor
    """[samples, length - 1]: 1 where a response token counts."""
    rollout_log_probs: Tensor
    """[samples, length - 1]; 0 outside the response."""
    advantages: Tensor
    """[samples, 1]"""


def make_rectangle(batch: TrainBatch, indices: Sequence[int]) -> Rectangle:
    """The samples of ``indices``, padded on the right, where a causal model's other tokens cannot see it."""
    length = max(2, *(len(batch.tokens[i]) for i in indices))
    tokens = torch.zeros(len(indices), length, dtype=torch.long)
    masks = torch.zeros(len(indices), length - 1)
    log_probs = torch.zeros(len(indices), length - 1)
    for row, i in enumerate(indices):
        end, count = len(batch.tokens[i]), batch.response_lengths[i]
        tokens[row, :end] = torch.tensor(batch.tokens[i])
        response = slice(end - 1 - count, end - 1)
        masks[row, response] = torch.tensor(batch.loss_masks[i], dtype=torch.float)
        log_probs[row, response] = torch.tensor(batch.rollout_log_probs[i])
    return Rectangle(tokens, masks, log_probs, torch.tensor([[batch.advantages[i]] for i in indices]))


def next_token_log_probs(model: GPTModel | DistributedDataParallel, tokens: Tensor, temperature: float) -> Tensor:
    """[samples, length] → log-prob of each next token, [samples, length - 1], at the temperature it was drawn with.

    Computed over the vocabulary's parts on the tensor-parallel ranks, without gathering the logits.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits = model(tokens, positions, None)[:, :-1]
    # Divided into a new tensor: the cross entropy works in place on what it is given.
    losses: Tensor = vocab_parallel_cross_entropy(logits.float() / temperature, tokens[:, 1:])
    return -losses


def train_step(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    batch: TrainBatch,
    algorithm: Algorithm,
    *,
    temperature: float,
    max_tokens: int,
) -> dict[str, float]:
    """Update the policy once with the whole batch, shared out over the data-parallel ranks. Collective.

    Gradients are summed up over micro-batches of at most ``max_tokens`` padded tokens.
    Loss and metrics are means over the batch's samples of means over a sample's tokens. Returns slime's metrics.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    samples = len(batch.tokens)
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    sums, largest_diff = torch.zeros(3), torch.zeros(())
    mine = range(dp_rank, samples, dp_size)
    for picked in micro_batches([len(batch.tokens[i]) for i in mine], max_tokens):
        terms, diff = _loss_terms(model, make_rectangle(batch, [mine[i] for i in picked]), algorithm, temperature)
        # DDP averages gradients over the ranks; the batch's mean wants their sum.
        (terms[0] * dp_size / samples).backward()
        sums += terms.detach()
        largest_diff = torch.maximum(largest_diff, diff)
    finalize_model_grads([model])
    _, grad_norm, _ = optimizer.step()
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(sums, group=group)
    torch.distributed.all_reduce(largest_diff, torch.distributed.ReduceOp.MAX, group=group)
    pg_loss, clipfrac, diff_mean = (sums / samples).tolist()
    return {
        "train/loss": pg_loss,
        "train/pg_loss": pg_loss,
        "train/pg_clipfrac": clipfrac,
        "train/grad_norm": float(grad_norm if grad_norm is not None else optimizer.get_grad_norm()),
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/train_rollout_logprob_abs_diff": diff_mean,
        "train/train_rollout_logprob_abs_diff_max": largest_diff.item(),
    }


def _loss_terms(
    model: DistributedDataParallel, rectangle: Rectangle, algorithm: Algorithm, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sums over samples of [loss, clip fraction, |trainer - engine| log-prob], and the largest of the last.

    A round is one step, so the policy that drew the samples is the policy now: the old log-probs are this
    forward pass, detached. The ratio is 1, its gradient is not 0.
    """
    log_probs = next_token_log_probs(model, rectangle.tokens, temperature)
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    loss, clipped = policy_loss(
        log_probs, log_probs.detach(), rectangle.advantages, eps_clip=algorithm.eps_clip, eps_clip_high=high
    )
    diff = (log_probs.detach() - rectangle.rollout_log_probs).abs() * rectangle.masks
    terms = torch.stack([sum_of_sample_means(x, rectangle.masks) for x in (loss, clipped, diff)])
    return terms, diff.max()
