import sys

import adapter_sizes
import pytest
from transformers import BertForSequenceClassification, DebertaV2ForSequenceClassification, ViTForImageClassification

from sigma_nens_hf.architectures import ARCHITECTURES

NORMS = 25 * 768 * 2 * 4  # bytes of 25 norms with gates and biases for one member
SCALES = 25 * 768 * 4  # and with the scale that members share
OF_FOUR = 4 * NORMS + SCALES


def test_every_family_has_a_shape():
    prefixes = {name.partition("For")[0] for name in ARCHITECTURES}
    assert {prefix for prefix, _ in adapter_sizes.SHAPES.values()} == prefixes


@pytest.mark.parametrize(
    ("model_class", "shape", "arguments", "expected"),
    [
        (BertForSequenceClassification, "bert-base-uncased", {}, (OF_FOUR, 4 * 2 * 769 * 4, 0)),
        (DebertaV2ForSequenceClassification, "deberta-v3-base", {}, (OF_FOUR, 4 * 2 * 769 * 4, 768 * 769 * 4)),
        (ViTForImageClassification, "vit-base-patch16-224", {"labels": 1000}, (OF_FOUR, 4 * 1000 * 769 * 4, 0)),
        (
            ViTForImageClassification,
            "vit-base-patch16-224",
            {"labels": 1000, "member_heads": "shared", "members": 8},
            (8 * NORMS + SCALES, 0, 1000 * 769 * 4),
        ),
    ],
)
def test_sizes_are_those_of_the_formula(model_class, shape, arguments, expected):
    sizes = adapter_sizes.stored_bytes(
        model_class, adapter_sizes.SHAPES[shape][1], adapter_sizes.Arguments(**arguments)
    )
    assert tuple(sizes.values()) == (25, *expected)


def test_table_is_printed(monkeypatch, capsys):
    shapes = {name: adapter_sizes.SHAPES[name] for name in ("albert-base-v2", "deit-base-distilled-patch16-224")}
    monkeypatch.setattr(adapter_sizes, "SHAPES", shapes)
    monkeypatch.setattr(sys, "argv", ["adapter_sizes.py", "--members", "2"])
    adapter_sizes.main()
    printed = capsys.readouterr().out
    assert "2 members and 2 classes" in printed
    assert "cls_classifier, distillation_classifier" in printed
