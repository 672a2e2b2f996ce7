import pytest
import tiny
import torch

from sigma_nens_hf import SigmaNormConfig
from sigma_nens_hf.blocks import block_names, branch_block, prefix_modules, trained_in_prefix
from sigma_nens_hf.members import base_model_of, take_prefix
from sigma_nens_hf.norms import find_norms

NUM_BLOCKS = {"albert": 1, "swin": 4, "swinv2": 4, "convnext": 3, "convnextv2": 3}
DECODERS = ("gpt2", "llama", "qwen2", "qwen3")
# Called before all blocks though it stands behind them: a table of positions, without weights and dropout.
POSITIONS = ("rotary_emb",)


def num_blocks(architecture):
    return NUM_BLOCKS.get(architecture.partition("-")[0], 2)


def can_branch(architecture):
    return architecture.partition("-")[0] not in ("albert", *DECODERS) and architecture != "modernbert-choice"


def calls(model, architecture):
    """When every module is called and when it is done, in one order for all."""
    events = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: events.append(("in", name)))
        module.register_forward_hook(lambda *_, name=name: events.append(("out", name)))
    model(**tiny.inputs(architecture, 2))
    return events


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_blocks_are_numbered_as_they_are_called(architecture):
    model = tiny.base_model(architecture)
    names = block_names(model)
    assert len(names) == num_blocks(architecture)
    called = [name for kind, name in calls(model, architecture) if kind == "in" and name in names]
    assert list(dict.fromkeys(called)) == names


@pytest.mark.parametrize("architecture", tiny.representatives("bert", "deberta_v2", "swin", "convnext"))
def test_blocks_go_by_the_same_names_under_an_adapter(architecture):
    model = tiny.base_model(architecture)
    names = block_names(model)
    assert block_names(tiny.adapt(model).get_base_model()) == names


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_prefix_is_what_is_called_before_the_block_and_not_again(architecture):
    model = tiny.base_model(architecture)
    blocks, events = block_names(model), calls(model, architecture)
    for number, block in enumerate(blocks):
        start = events.index(("in", block))
        before = {name for kind, name in events[:start] if kind == "out"}
        after = {name for _, name in events[start:]}
        found = prefix_modules(model, number)
        expected = {name for name in before - after if not name.endswith(POSITIONS)}
        assert {name for name in found if name in before | after} == expected
        assert all(model.get_submodule(name) is module for name, module in found.items())


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_rows_can_be_repeated_at_the_first_block_that_carries_members(architecture):
    model = tiny.base_model(architecture)
    for block in range(num_blocks(architecture)):
        norms = find_norms(model, SigmaNormConfig(branch_layer=block))
        first = branch_block(model, norms)
        # Block 0 of DeBERTa v2 has a convolution beside it, which joins what goes in with what comes out.
        expected = can_branch(architecture) and not (architecture == "deberta_v2" and block == 0)
        assert first == (block if expected else None)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_rows_are_repeated_at_the_inputs_where_a_norm_before_all_blocks_carries_members(architecture):
    model = tiny.base_model(architecture)
    everything = find_norms(model, SigmaNormConfig())
    events = [name for kind, name in calls(model, architecture) if kind == "in"]
    starts_in_block = events.index(everything[0]) > events.index(block_names(model)[0])
    first = branch_block(model, everything)
    assert first == (0 if starts_in_block and can_branch(architecture) and architecture != "deberta_v2" else None)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_branches_late_unless_it_takes_a_mean(pooling):
    model = tiny.base_model("modernbert", classifier_pooling=pooling)
    norms = find_norms(model, SigmaNormConfig(branch_layer=1))
    assert branch_block(model, norms) == (1 if pooling == "cls" else None)


def test_members_on_later_norms_alone_start_at_their_block():
    model = tiny.base_model("vit", num_hidden_layers=4)
    norms = [f"vit.layers.{block}.layernorm_after" for block in (3, 2)]
    assert branch_block(model, norms) == 2
    assert branch_block(model, ["vit.layernorm"]) == 3


def test_members_on_a_norm_between_two_stages_start_at_the_block_before_it():
    for architecture, end in {"convnext": "downsampling_layer.0", "swin": "downsample.norm"}.items():
        model = tiny.base_model(architecture)
        between = next(name for name in find_norms(model, SigmaNormConfig()) if name.endswith(end))
        number = branch_block(model, [between])
        called = [name for kind, name in calls(model, architecture) if kind == "in"]
        blocks = block_names(model)
        assert called.index(blocks[number]) < called.index(between) < called.index(blocks[number + 1])


@pytest.mark.parametrize(
    "architecture",
    [
        one if one in ("bert", "deberta", "deberta_v3", "mpnet", "swin") else pytest.param(one, marks=pytest.mark.slow)
        for one in tiny.ARCHITECTURES
        if can_branch(one) and not one.endswith("-choice")
    ],
)
def test_weights_of_the_prefix_are_those_that_its_features_hang_on(architecture):
    """Some stand behind the blocks and are used in front of them."""
    model = base_model_of(tiny.ensemble(architecture, base=tiny.without_dropout(architecture), branch_layer=1))
    assert trained_in_prefix(model, 1) == []
    parameters = {name: parameter.requires_grad_() for name, parameter in model.named_parameters()}
    features = take_prefix(model, **tiny.inputs(architecture, with_labels=False)).square().sum()
    gradients = torch.autograd.grad(features, list(parameters.values()), allow_unused=True)
    used = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    # DINO's stands for patches that are hidden in pretraining.
    assert {name for name in trained_in_prefix(model, 1) if not name.endswith("mask_token")} == used
