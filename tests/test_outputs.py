import copy
import pickle

import pytest
import tiny
import torch
from torch.utils import _pytree
from transformers.modeling_outputs import SequenceClassifierOutput

from sigma_nens_hf.outputs import ensemble_logits, ensemble_output_class


def test_single_label_logits_are_the_log_of_the_mean_probability():
    member_logits = torch.randn(5, 3, 7) * 4
    expected = member_logits.double().softmax(-1).mean(1).log()
    torch.testing.assert_close(ensemble_logits(member_logits, "single_label_classification"), expected.float())
    mean_of_logits = member_logits.mean(1).softmax(-1)
    assert (mean_of_logits - expected.exp()).abs().max() > 0.1  # the rule that it must not be


def test_multi_label_logits_are_the_logit_of_the_mean_sigmoid():
    member_logits = torch.randn(5, 3, 7) * 4
    mean = member_logits.double().sigmoid().mean(1)
    expected = (mean / (1 - mean)).log()
    torch.testing.assert_close(ensemble_logits(member_logits, "multi_label_classification"), expected.float())


def test_extreme_logits_stay_finite():
    member_logits = torch.tensor([[[200.0, -200.0], [150.0, -150.0]]])
    for problem_type in ("single_label_classification", "multi_label_classification"):
        assert ensemble_logits(member_logits, problem_type).isfinite().all()


def test_regression_is_the_mean():
    member_logits = torch.randn(5, 3, 1)
    torch.testing.assert_close(ensemble_logits(member_logits, "regression"), member_logits.mean(1))


def test_half_precision_is_reduced_in_fp32():
    member_logits = torch.randn(5, 3, 7).to(torch.bfloat16)
    logits = ensemble_logits(member_logits, "single_label_classification")
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(5))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.no_grad()
def test_output_is_the_base_models_with_one_field_more(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture)
    output = model(**batch, output_hidden_states=True)
    with model.disable_adapter():
        plain = model(**batch, output_hidden_states=True)
    assert isinstance(output, type(plain))
    caches = {"cache", "past_key_values"}  # of a decoder, which an ensemble does not make
    assert list(output.keys()) == [*(name for name in plain if name not in caches), "member_logits"]
    rows = 5 * tiny.NUM_CHOICES if architecture in tiny.CHOICE_ARCHITECTURES else 5
    assert all(state.shape[:2] == (rows, 4) for state in output.hidden_states)


def test_output_class_is_made_once_and_survives_copies():
    output_class = ensemble_output_class(SequenceClassifierOutput)
    assert ensemble_output_class(SequenceClassifierOutput) is output_class
    output = output_class(logits=torch.ones(2, 3), member_logits=torch.ones(2, 4, 3))
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert type(other) is output_class
        assert torch.equal(other.member_logits, output.member_logits)
        assert other.loss is None
    leaves, spec = _pytree.tree_flatten(output)
    assert len(leaves) == 2
    assert torch.equal(_pytree.tree_unflatten(leaves, spec).member_logits, output.member_logits)
