import pytest
from transformers import HfArgumentParser

from sigma_nens_hf import SigmaNEnsTrainingArguments, temperature_for_sharing


def arguments(tmp_path, **kwargs):
    return SigmaNEnsTrainingArguments(output_dir=str(tmp_path), **kwargs)


def test_defaults(tmp_path):
    args = arguments(tmp_path)
    assert (args.diversity_weight, args.resolved_temperature(4)) == (0.15, 0.1)
    assert (args.learning_rate, args.scaler_learning_rate, args.modules_to_save_learning_rate) == (
        6e-3,
        3e-2,
        2e-4,
    )
    assert (args.weight_decay, args.return_member_logits) == (0, False)


def test_members_per_feature_stands_for_a_temperature(tmp_path):
    args = arguments(tmp_path, members_per_feature=3)
    assert args.resolved_temperature(8) == temperature_for_sharing(3, 8)
    with pytest.raises(ValueError, match="from 1 to 2 for 4 members"):
        args.resolved_temperature(4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"diversity_temperature": 0.1, "members_per_feature": 1}, "not both"),
        ({"diversity_temperature": 0.0}, "finite and positive"),
        ({"diversity_temperature": float("nan")}, "finite and positive"),
        ({"diversity_weight": -1.0}, "not negative"),
        ({"members_per_feature": 0}, "at least 1"),
        ({"prefix_epochs": 0}, "prefix_epochs must be finite and positive"),
        ({"prefix_epochs": "1"}, "prefix_epochs must be finite and positive"),
        ({"prefix_cache": True}, "prefix_cache must be a folder, or None, got True"),
        ({"prefix_cache": __file__}, "prefix_cache must be a folder, but .* is a file"),
        ({"diversity_reduction": "max"}, "diversity_reduction must be one of"),
    ],
)
def test_wrong_values_are_named(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **fields)


def test_command_line(tmp_path):
    parser = HfArgumentParser(SigmaNEnsTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--members_per_feature", "2", "--diversity_layers", "a", "b"]
    )
    assert args.members_per_feature == 2
    assert args.diversity_layers == ["a", "b"]
    assert args.diversity_temperature is None
