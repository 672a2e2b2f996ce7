import pytest
import tiny
import torch
from torch.nn import functional

from sigma_nens_hf.losses import task_loss

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


@pytest.mark.parametrize("architecture", [name for name in tiny.ARCHITECTURES if name != "deit-teacher"])
@torch.no_grad()
def test_loss_is_that_of_transformers(architecture):
    model = tiny.base_model(architecture)
    batch = tiny.inputs(architecture, 6)
    output = model(**batch)
    torch.testing.assert_close(task_loss(output.logits, batch["labels"], SINGLE), output.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("problem_type", "num_labels"), [(MULTI, 3), (REGRESSION, 3), (REGRESSION, 1)])
@pytest.mark.parametrize("architecture", [*tiny.SEQUENCE_ARCHITECTURES, "vit", "swin", "convnext", "clip"])
@torch.no_grad()
def test_loss_of_other_problem_types_is_that_of_transformers(architecture, problem_type, num_labels):
    model = tiny.base_model(architecture, num_labels=num_labels, problem_type=problem_type)
    labels = torch.rand(6, num_labels).round() if problem_type == MULTI else torch.randn(6, num_labels).squeeze(-1)
    output = model(**tiny.inputs(architecture, 6, with_labels=False), labels=labels)
    torch.testing.assert_close(task_loss(output.logits, labels, problem_type), output.loss, rtol=1e-5, atol=1e-6)


def test_shares_of_a_larger_batch_add_up_to_its_loss():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, 3), torch.randint(0, 3, (6, 5))
    labels[0], labels[1, 2:], labels[4, 1:] = -100, -100, -100
    count = (labels != -100).sum()
    shares = [task_loss(logits[rows], labels[rows], SINGLE, count) for rows in (slice(0, 2), slice(2, 6))]
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(sum(shares), expected)
    means = torch.stack([task_loss(logits[rows], labels[rows], SINGLE) for rows in (slice(0, 2), slice(2, 6))])
    assert (means.mean() - expected).abs() > 0.01  # what a mean of means would be


def test_batch_without_any_label_costs_nothing():
    assert task_loss(torch.randn(2, 3), torch.tensor([-100, -100]), SINGLE) == 0


def test_loss_of_half_precision_is_computed_in_full():
    logits, labels = torch.randn(8, 3).half(), torch.randint(0, 3, (8,))
    loss = task_loss(logits, labels, SINGLE)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, functional.cross_entropy(logits.float(), labels))
