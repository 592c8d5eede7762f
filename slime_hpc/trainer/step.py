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
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass. Column t of the per-token values belongs to the prediction of token t+1."""

    sequences: list[Tensor]
    """Prompt and response of each."""
    masks: Tensor
    """[samples, longest]: 1 where a response token counts."""
    rollout_log_probs: Tensor
    """[samples, longest]; 0 outside the response."""
    advantages: Tensor
    """[samples, 1]"""


def make_micro_batch(batch: TrainBatch, indices: Sequence[int]) -> MicroBatch:
    sequences = [torch.tensor(batch.tokens[i]) for i in indices]
    masks = torch.zeros(len(sequences), max(map(len, sequences)))
    log_probs = torch.zeros_like(masks)
    for row, i in enumerate(indices):
        end, count = len(batch.tokens[i]), batch.response_lengths[i]
        response = slice(end - 1 - count, end - 1)
        masks[row, response] = torch.tensor(batch.loss_masks[i], dtype=torch.float)
        log_probs[row, response] = torch.tensor(batch.rollout_log_probs[i])
    return MicroBatch(sequences, masks, log_probs, torch.tensor([[batch.advantages[i]] for i in indices]))


def next_token_log_probs(
    model: GPTModel | DistributedDataParallel, sequences: Sequence[Tensor], temperature: float
) -> Tensor:
    """Log-prob of each next token at the temperature it was drawn with, [samples, longest].

    A sequence's last token has none: its column and those behind it mean nothing. The sequences go through the model
    packed in one row, where none sees another. Log-probs are computed over the vocabulary's parts on the
    tensor-parallel ranks, without gathering the logits.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parts = [*sequences, *_filling(model.config, sum(map(len, sequences)))]
    tokens = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    logits = model(tokens, positions, None, packed_seq_params=_packed(parts))
    # Divided into a new tensor: the cross entropy works in place on what it is given.
    losses: Tensor = vocab_parallel_cross_entropy(logits.float() / temperature, tokens.roll(-1, dims=1))
    each = list(torch.split(-losses[0], [len(part) for part in parts]))
    return torch.nn.utils.rnn.pad_sequence(each[: len(sequences)], batch_first=True)


def _filling(config: TransformerConfig, tokens: int) -> list[Tensor]:
    """Up to one more sequence, so that sequence parallelism can share the tokens out evenly."""
    missing = -tokens % config.tensor_model_parallel_size if config.sequence_parallel else 0
    return [torch.zeros(missing, dtype=torch.long)] if missing else []


def _packed(parts: Sequence[Tensor]) -> PackedSeqParams:
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = torch.tensor([0, *map(len, parts)])
    ends, longest = lengths.cumsum(0, dtype=torch.int32), int(lengths.max())
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


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

    Gradients are summed up over micro-batches of at most ``max_tokens`` tokens. A sample without advantage, as are all
    those of a group with equal rewards, has none, and is only measured.
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
    for has_gradient in (True, False):
        chosen = [i for i in mine if (batch.advantages[i] != 0) is has_gradient]
        for picked in micro_batches([len(batch.tokens[i]) for i in chosen], max_tokens):
            micro_batch = make_micro_batch(batch, [chosen[i] for i in picked])
            with torch.set_grad_enabled(has_gradient):
                terms, diff = _loss_terms(model, micro_batch, algorithm, temperature)
            if has_gradient:
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
        "train/grad_norm": float(grad_norm if optimizer.config.clip_grad else optimizer.get_grad_norm()),
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/train_rollout_logprob_abs_diff": diff_mean,
        "train/train_rollout_logprob_abs_diff_max": largest_diff.item(),
    }


def _loss_terms(
    model: DistributedDataParallel, micro_batch: MicroBatch, algorithm: Algorithm, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sums over samples of [loss, clip fraction, |trainer - engine| log-prob], and the largest of the last.

    A round is one step, so the policy that drew the samples is the policy now: the old log-probs are this
    forward pass, detached. The ratio is 1, its gradient is not 0.
    """
    log_probs = next_token_log_probs(model, micro_batch.sequences, temperature)
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    loss, clipped = policy_loss(
        log_probs, log_probs.detach(), micro_batch.advantages, eps_clip=algorithm.eps_clip, eps_clip_high=high
    )
    diff = (log_probs.detach() - micro_batch.rollout_log_probs).abs() * micro_batch.masks
    terms = torch.stack([sum_of_sample_means(x, micro_batch.masks) for x in (loss, clipped, diff)])
    return terms, diff.max()
