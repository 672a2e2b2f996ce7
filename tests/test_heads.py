import pytest
import tiny
import torch
from peft import get_peft_model

from sigma_nens_hf import MemberHead, SigmaNormConfig, extract_member
from sigma_nens_hf.architectures import ARCHITECTURES


def heads_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, MemberHead)}


def saved_copies(model):
    return sorted(n for n, _ in model.named_parameters() if ".modules_to_save." in n and n.endswith("weight"))


def layout(architecture):
    return ARCHITECTURES[tiny.model_class(architecture).__name__]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_fresh_heads_differ_and_are_drawn_as_the_model_draws_its_own(architecture):
    model = tiny.ensemble(architecture, num_members=64)
    heads = heads_of(model).values()
    assert len(heads) == len(layout(architecture).outputs)
    for head in heads:
        weight = head.sigma_norm_head_weight["default"]
        outputs = 1 if architecture in tiny.CHOICE_ARCHITECTURES else 3
        assert weight.shape == (64, outputs, head.base_layer.in_features)
        assert len({tuple(row.flatten().tolist()) for row in weight}) == 64
        own = 0.6
        if architecture.partition("-")[0] in ("modernbert", "clip", "siglip"):  # which scale heads by their size
            own = tiny.HIDDEN_SIZE**-0.5
        assert weight.std().item() == pytest.approx(own, rel=0.1)
        assert head.base_layer.weight.std().item() == pytest.approx(own, rel=0.4)
        if head.base_layer.bias is not None:
            assert not head.sigma_norm_head_bias["default"].any()


@pytest.mark.parametrize(
    "architecture",
    tiny.representatives(
        "bert",
        "roberta",
        "distilbert",
        "deberta_v3",
        "modernbert",
        "llama",
        "electra-choice",
        "bert-token",
        "deit-teacher",
        "dinov2",
        "siglip",
    ),
)
def test_head_forms(architecture):
    head = layout(architecture)
    last_only = tiny.ensemble(architecture)
    assert len(heads_of(last_only)) == len(head.outputs)
    assert len(saved_copies(last_only)) == len(head.before)  # the rest of a fresh head is trained as one copy
    whole = tiny.ensemble(architecture, member_heads="all")
    assert len(heads_of(whole)) == len(head.projections)
    assert not saved_copies(whole)
    shared = tiny.ensemble(architecture, member_heads=[])
    assert not heads_of(shared)
    assert len(saved_copies(shared)) == len(head.projections)
    batch = tiny.inputs(architecture)
    for model in (last_only, whole, shared):
        output = model(**batch).member_logits
        alone = torch.stack([extract_member(model, k)(**batch).logits for k in range(4)], 1)
        assert tiny.relative_error(output, alone) < 1e-5


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_shared_head_is_trained_even_if_it_came_with_the_checkpoint(architecture):
    model = tiny.ensemble(architecture, head_init="copy", member_heads=[])
    expected = list(layout(architecture).outputs)
    if architecture in ("distilbert", "distilbert-choice"):  # peft goes by the end of a name
        expected.append("pre_classifier")
    assert saved_copies(model) == sorted(f"base_model.model.{n}.modules_to_save.default.weight" for n in expected)


@pytest.mark.parametrize("architecture", ["roberta", "distilbert", "deberta_v3", "modernbert-token"])
def test_copied_head_leaves_the_rest_as_it_came(architecture):
    model = tiny.ensemble(architecture, head_init="copy")
    (head,) = heads_of(model).values()
    for member in head.sigma_norm_head_weight["default"]:
        assert torch.equal(member, head.base_layer.weight)
    assert not saved_copies(model)


@pytest.mark.parametrize("member_heads", [None, []])
@pytest.mark.parametrize("architecture", [a for a in tiny.ARCHITECTURES if a not in tiny.CHOICE_ARCHITECTURES])
def test_heads_are_sized_from_the_adapter(architecture, member_heads):
    names = {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    model = tiny.ensemble(architecture, num_labels=2, id2label=names, member_heads=member_heads)
    output = model(**tiny.inputs(architecture, num_labels=5))
    assert output.member_logits.shape[:2] == (5, 4)
    assert output.member_logits.shape[-1] == 5
    assert architecture == "deit-teacher" or output.loss.isfinite()
    assert model.config.id2label == names
    assert model.config.num_labels == 5


def test_copying_a_head_of_another_size_is_refused():
    with pytest.raises(ValueError, match="3 outputs cannot be copied into one with 5"):
        tiny.ensemble("bert", num_labels=3, head_init="copy", id2label=dict(enumerate("abcde")))


@pytest.mark.parametrize(("first", "second"), [(None, []), ([], None)])
def test_adapters_on_one_model_must_have_the_head_in_one_form(first, second):
    model = tiny.ensemble("bert", member_heads=first)
    with pytest.raises(ValueError, match=r"\['classifier'\] in another form"):
        model.add_adapter("second", SigmaNormConfig(member_heads=second))
    batch = tiny.inputs("bert")
    assert model(**batch).member_logits.shape == (5, 4, 3)


@pytest.mark.filterwarnings("ignore:Adapter second was active")
@pytest.mark.parametrize("architecture", ["bert", "distilbert", "deit-teacher"])
def test_shared_heads_of_different_sizes_go_on_one_model(architecture):
    base = tiny.base_model(architecture, num_labels=2)
    batch = tiny.inputs(architecture, with_labels=False)
    plain = base(**batch).logits
    model = tiny.adapt(base, member_heads=[], num_labels=4)
    model.add_adapter("second", SigmaNormConfig(member_heads=[], num_labels=5))
    assert model(**batch).logits.shape == (5, 4)
    model.set_adapter("second")
    assert model(**batch).logits.shape == (5, 5)
    with model.disable_adapter():  # the base's own head is as it was
        assert torch.equal(model(**batch).logits, plain)
    model.delete_adapter("second")
    assert model(**batch).logits.shape == (5, 4)
    assert torch.equal(model.unload()(**batch).logits, plain)


def test_refused_config_leaves_the_model_as_it_was():
    base = tiny.base_model("bert")
    expected = base(**tiny.inputs("bert")).logits
    with pytest.raises(ValueError, match="cannot be copied"):
        get_peft_model(base, SigmaNormConfig(head_init="copy", num_labels=5))
    assert torch.equal(base(**tiny.inputs("bert")).logits, expected)
    assert get_peft_model(base, SigmaNormConfig()).eval()(**tiny.inputs("bert")).member_logits.shape == (5, 4, 3)


def test_unknown_projection_is_named():
    with pytest.raises(ValueError, match=r"\['pooler'\], but the projections .* \['classifier'\]"):
        tiny.ensemble("bert", member_heads=["pooler"])


def test_choices_have_no_number_of_labels():
    with pytest.raises(ValueError, match="any number of choices, and they have no names; leave num_labels out"):
        tiny.ensemble("bert-choice", num_labels=2, id2label={0: "a", 1: "b"})
    assert tiny.ensemble("bert-choice").peft_config["default"].num_labels is None


def test_head_without_outputs_is_named():
    with pytest.raises(ValueError, match="projects onto no classes; load the model with num_labels"):
        tiny.ensemble("vit", num_labels=0)
