"""Numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from slime_hpc.algorithm import grpo_advantages, policy_loss, sum_of_sample_means


def test_grpo_advantages_use_the_unbiased_deviation_of_each_group() -> None:
    advantages = grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]]))
    expected = [[0.866024, -0.866024, -0.866024, 0.866024], [0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.7, 1.7, 3.3, 10.1, 100.1])
def test_grpo_advantages_of_equal_rewards_are_zero_however_their_mean_is_rounded(
    reward: float, normalize_std: bool
) -> None:
    for samples in (8, 12):
        advantages = grpo_advantages(torch.full((1, samples), reward), normalize_std=normalize_std)
        assert advantages.tolist() == [[0.0] * samples]


def test_grpo_advantages_without_deviation_are_centred_rewards() -> None:
    advantages = grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), normalize_std=False)
    assert advantages.tolist() == [[0.5, -0.5, -0.5, 0.5]]


def test_grpo_advantage_of_a_lone_sample_is_zero() -> None:
    assert grpo_advantages(torch.tensor([[0.7]])).tolist() == [[0.0]]


def test_policy_loss_is_clipped_on_the_side_where_moving_on_would_pay() -> None:
    ratios, advantages = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.1]), torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    loss, clipped = policy_loss(ratios.log(), torch.zeros(5), advantages, eps_clip=0.2, eps_clip_high=0.2)
    torch.testing.assert_close(loss, torch.tensor([-2.4, 4.0, -1.0, 1.6, -1.1]))
    assert clipped.tolist() == [1, 0, 0, 1, 0]


def test_policy_loss_clips_high_and_low_on_their_own() -> None:
    ratios, advantages = torch.tensor([1.25, 1.5, 0.75]), torch.tensor([1.0, 1.0, -1.0])
    loss, clipped = policy_loss(ratios.log(), torch.zeros(3), advantages, eps_clip=0.2, eps_clip_high=0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.25, -1.28, 0.8]))
    assert clipped.tolist() == [0, 1, 1]


def test_policy_gradient_of_an_unchanged_policy_is_the_advantage_and_of_a_clipped_token_nothing() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -1.5])
    loss, _ = policy_loss(log_probs, old, torch.tensor([0.5, -3.0, 1.0]), eps_clip=0.2, eps_clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 3.0, 0.0]))


@pytest.mark.parametrize(
    ("shape", "counts", "expected"),
    [((3, 3), None, 15.0), ((4, 3), [9, 9, 9, 3], 16.0)],
    ids=["own denominators", "three samples of one trajectory and one alone"],
)
def test_sum_of_sample_means(shape: tuple[int, int], counts: list[int] | None, expected: float) -> None:
    values = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
    token_counts = None if counts is None else torch.tensor(counts)
    assert sum_of_sample_means(values, torch.ones(shape), token_counts).item() == pytest.approx(expected)


def test_mean_of_means_does_not_depend_on_how_samples_are_cut_into_micro_batches() -> None:
    values = torch.tensor([[k * 10.0**j for k in range(1, 9)] for j in range(4)])
    whole = sum_of_sample_means(values, torch.ones(4, 8)) / 4
    parts = sum(sum_of_sample_means(values[i : i + 1], torch.ones(1, 8)) for i in range(4)) / 4
    assert whole.item() == pytest.approx(1249.875)
    assert float(parts) == pytest.approx(1249.875)


def test_masked_tokens_do_not_count_and_an_empty_sample_adds_zero() -> None:
    values = torch.tensor([[2.0, 100.0, 4.0], [7.0, 7.0, 7.0]])
    masks = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert sum_of_sample_means(values, masks).item() == 3.0
