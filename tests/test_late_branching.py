import copy
import pickle
import threading
import warnings

import pytest
import tiny
import torch
from test_blocks import can_branch, num_blocks

from sigma_nens_hf import SigmaNormConfig, extract_member, load_ensemble, member_subset
from sigma_nens_hf.blocks import block_names
from sigma_nens_hf.call_arguments import PREFIX_FEATURES
from sigma_nens_hf.forward_pass import ForwardPass, InForwardPass
from sigma_nens_hf.late_branching import Branch, RepeatRows
from sigma_nens_hf.members import active_branch, base_model_of, branch_at, take_prefix

TOLERANCE = 1e-5
LATE = [name for name in tiny.ARCHITECTURES if can_branch(name)]
FAST = ("deberta_v2", "vit", "swin", "bert-choice")


def representatives(names=LATE, fast=FAST):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def without_randomness(architecture):
    # DINOv3 stretches its coordinates at random in training.
    return tiny.without_dropout(architecture) | ({"pos_embed_rescale": None} if architecture == "dinov3" else {})


def late(architecture, branch_layer=1, base=None, **config):
    settings = {**without_randomness(architecture), **(base or {})}
    return tiny.ensemble(architecture, base=settings, branch_layer=branch_layer, **config)


def without_branch(model):
    """A copy whose rows are repeated at the inputs."""
    plain = copy.deepcopy(model)
    branch_at(base_model_of(plain), "default", None)
    return plain


def blocks_of(model):
    base = base_model_of(model)
    return [base.get_submodule(name) for name in block_names(base)]


def loss_of(output):
    return output.loss if "loss" in output else output.member_logits.square().mean()


def gradients(model, **batch):
    """The output of a training step's forward pass, and the gradients of all that is trained."""
    model.train()
    output = model(**batch)
    loss_of(output).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model.eval()
    return output, found


def assert_same_output(actual, expected):
    assert actual.keys() >= expected.keys()
    for name in expected:
        if name == "member_logits" or name.endswith("logits"):
            assert tiny.relative_error(actual[name], expected[name]) < TOLERANCE, name
    if "loss" in actual:
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(gradient.abs().max(), 1e-3 * largest)  # a bias before a softmax over choices feels nothing
        assert (actual[name] - gradient).abs().max() < 2e-4 * scale, name


@pytest.mark.parametrize("prefix", ["frozen", "shared"])
@pytest.mark.parametrize("architecture", representatives())
def test_late_branch_computes_what_rows_repeated_at_the_inputs_do(architecture, prefix):
    for branch_layer in range(num_blocks(architecture)):
        model = late(architecture, branch_layer, prefix=prefix)
        if architecture == "deberta_v2" and branch_layer == 0:
            assert active_branch(base_model_of(model)) is None
            continue
        assert active_branch(base_model_of(model)) == branch_layer
        if prefix == "shared":
            tiny.make_trainable_parts_random(model)
        plain = without_branch(model)
        for batch_size in (1, 4, 5):
            batch = tiny.inputs(architecture, batch_size)
            output, found = gradients(model, **batch)
            expected, wanted = gradients(plain, **batch)
            assert_same_output(output, expected)
            assert_same_gradients(found, wanted)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 11, 16, 17, 18, 8])
@pytest.mark.parametrize("architecture", representatives(fast=("mpnet", "deberta_v3", "modernbert", "dinov3")))
@torch.no_grad()
def test_batch_as_large_as_another_dimension(architecture, batch_size):
    """4 heads, members, patches in a row; 11 tokens; 16 patches, and one or two more with class and distillation."""
    model = late(architecture)
    plain = without_branch(model)
    batch = tiny.inputs(architecture, batch_size)
    assert_same_output(model(**batch), plain(**batch))
    with member_subset(model, [2, 0]), member_subset(plain, [2, 0]):
        assert_same_output(model(**batch), plain(**batch))


@pytest.mark.parametrize("architecture", representatives())
def test_subset_of_members_branches_late(architecture):
    model = late(architecture, num_blocks(architecture) - 1)
    plain, batch = without_branch(model), tiny.inputs(architecture)
    for members in ([2, 0], 3):
        with member_subset(model, members), member_subset(plain, members):
            output, found = gradients(model, **batch)
            expected, wanted = gradients(plain, **batch)
        assert_same_output(output, expected)
        assert_same_gradients(found, wanted)


@pytest.mark.parametrize("architecture", representatives())
@torch.no_grad()
def test_blocks_below_the_branch_see_every_example_once(architecture):
    for branch_layer in range(num_blocks(architecture)):
        model = late(architecture, branch_layer)
        if active_branch(base_model_of(model)) is None:
            continue
        rows = []
        for block in blocks_of(model):
            block.register_forward_hook(lambda _, args, output, rows=rows: rows.append(len(_first(output))))
        num_rows = 5 * tiny.NUM_CHOICES if architecture in tiny.CHOICE_ARCHITECTURES else 5
        model(**tiny.inputs(architecture, 5))
        above = num_blocks(architecture) - branch_layer
        assert rows == [num_rows] * branch_layer + [4 * num_rows] * above
        rows.clear()
        with member_subset(model, [1, 3]):
            model(**tiny.inputs(architecture, 5))
        assert rows == [num_rows] * branch_layer + [2 * num_rows] * above


def _first(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("architecture", representatives())
def test_nothing_below_the_branch_is_kept_for_the_backward_pass(architecture):
    kept, is_below = {True: 0, False: 0}, [True]

    def pack(tensor):
        kept[is_below[0]] += 1
        return tensor

    for prefix in ("frozen", "shared"):
        model = late(architecture, num_blocks(architecture) - 1, prefix=prefix).train()
        blocks_of(model)[-1].register_forward_pre_hook(lambda *_: is_below.__setitem__(0, False))
        kept.update({True: 0, False: 0})
        is_below[0] = True
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**tiny.inputs(architecture))
        assert kept[False] > 0
        assert (kept[True] == 0) == (prefix == "frozen")


WITHOUT_CHOICES = [name for name in LATE if name not in tiny.CHOICE_ARCHITECTURES]


@pytest.mark.parametrize("prefix", ["frozen", "shared"])
@pytest.mark.parametrize("architecture", representatives(WITHOUT_CHOICES))
def test_prefix_taken_out_and_put_in_again_is_the_whole(architecture, prefix):
    for branch_layer in range(num_blocks(architecture)):
        model = late(architecture, branch_layer, prefix=prefix)
        base = base_model_of(model)
        if active_branch(base) is None:
            continue
        for batch_size in (1, 4, 5):
            batch = tiny.inputs(architecture, batch_size)
            features = take_prefix(base, **batch)
            has_copies = any(name.endswith("scaler.default") and len(p) == 1 for name, p in model.named_parameters())
            assert features.requires_grad == has_copies
            assert len(features) == batch_size
            expected, wanted = gradients(model, **batch)
            output, found = gradients(model, **{PREFIX_FEATURES: take_prefix(base, **batch)}, **batch)
            assert_same_output(output, expected)
            assert_same_gradients(found, wanted)
            with member_subset(model, [3, 1]), torch.no_grad():
                assert torch.equal(take_prefix(base, **batch), features)
                assert_same_output(model(**{PREFIX_FEATURES: features}, **batch), model(**batch))


@torch.no_grad()
def test_one_image_stands_for_the_size_of_all_where_features_are_given():
    for architecture in ("vit", "swin", "convnext", "dinov2"):
        model = late(architecture)
        batch = tiny.inputs(architecture)
        features = take_prefix(base_model_of(model), **batch)
        empty = {**batch, "pixel_values": torch.zeros_like(batch["pixel_values"][:1])}
        assert_same_output(model(**{PREFIX_FEATURES: features}, **empty), model(**batch))


@torch.no_grad()
def test_features_in_sixteen_bits_are_taken_as_they_are():
    model = late("bert")
    batch = tiny.inputs("bert")
    features = take_prefix(base_model_of(model), **batch)
    assert_same_output(
        model(**{PREFIX_FEATURES: features.bfloat16()}, **batch),
        model(**{PREFIX_FEATURES: features.bfloat16().float()}, **batch),
    )


@pytest.mark.parametrize("architecture", representatives())
@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_all_members_in_all_layers(architecture):
    model = late(architecture, base={"attn_implementation": "eager"} if "conv" not in architecture else None)
    plain, batch = without_branch(model), tiny.inputs(architecture)
    asked = {"output_hidden_states": True}
    if "convnext" not in architecture:
        asked["output_attentions"] = True
    output, expected = model(**batch, **asked), plain(**batch, **asked)
    assert_same_output(output, model(**batch))
    rows = 5 * tiny.NUM_CHOICES if architecture in tiny.CHOICE_ARCHITECTURES else 5
    for name in ("hidden_states", *(["attentions"] if "output_attentions" in asked else [])):
        assert len(output[name]) == len(expected[name]) > 0
        for states, wanted in zip(output[name], expected[name], strict=True):
            assert states.shape[1] == 4
            assert states.shape[0] >= rows  # attention windows are rows of their own
            assert torch.equal(states, wanted)


@torch.no_grad()
def test_hidden_states_asked_for_in_the_config():
    model = late("vit", base={"output_hidden_states": True})
    assert [states.shape[:2] for states in model(**tiny.inputs("vit")).hidden_states] == [(5, 4)] * 3


@pytest.mark.parametrize("architecture", ["albert", "gpt2", "llama", "qwen2", "qwen3", "modernbert-choice"])
def test_wish_for_a_late_branch_that_cannot_be_granted_is_warned_of(architecture):
    settings = {"num_hidden_groups": 2} if architecture == "albert" else None
    with pytest.warns(UserWarning, match="cannot be repeated at a block. Its members start at block 1 all the same"):
        model = late(architecture, base=settings)
    base, batch = base_model_of(model), tiny.inputs(architecture)
    assert active_branch(base) is None
    assert model(**batch).member_logits.shape[1] == 4
    with pytest.raises(ValueError, match="no prefix that could be computed apart: give it a branch_layer"):
        take_prefix(base, **batch)


@pytest.mark.parametrize("branch_layer", [None, 0])
def test_no_warning_where_no_late_branch_was_wished_for(branch_layer):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tiny.ensemble("llama", branch_layer=branch_layer)
        tiny.ensemble("bert", branch_layer=branch_layer)


def test_mean_pooling_of_modernbert_is_warned_of():
    with pytest.warns(UserWarning, match="cannot be repeated at a block"):
        model = late("modernbert", base={"classifier_pooling": "mean"})
    assert model(**tiny.inputs("modernbert")).member_logits.shape == (5, 4, 3)


@pytest.mark.parametrize(
    ("model", "architecture", "asked"),
    [
        (lambda: late("bert", None), "bert", {}),
        (lambda: late("bert-choice"), "bert-choice", {}),
        (lambda: late("bert"), "bert", {"output_hidden_states": True}),
        (lambda: late("vit", base={"output_attentions": True}), "vit", {}),
    ],
)
def test_prefix_that_is_not_there_is_refused(model, architecture, asked):
    model, batch = model(), tiny.inputs(architecture)
    with pytest.raises(ValueError, match="has no prefix that could be computed apart"):
        take_prefix(base_model_of(model), **batch, **asked)
    with pytest.raises(ValueError, match="has no prefix that could be computed apart"):
        model(**batch, **asked, **{PREFIX_FEATURES: torch.zeros(5, 11, tiny.HIDDEN_SIZE)})
    assert model(**batch).member_logits.shape[1] == 4


@pytest.mark.parametrize(
    "architecture", representatives(["bert", "roberta", "deberta_v3", "modernbert", "electra"], ("bert", "modernbert"))
)
@torch.no_grad()
def test_further_arguments_of_texts(architecture):
    model = late(architecture)
    plain = without_branch(model)
    for batch_size in (1, 4, 5):
        batch = tiny.inputs(architecture, batch_size)
        for positions in (torch.arange(11)[None], torch.arange(11).expand(batch_size, 11) + 2):
            assert_same_output(model(**batch, position_ids=positions), plain(**batch, position_ids=positions))
        ids, mask = batch["input_ids"], batch["attention_mask"]
        for arguments in ({"attention_mask": None, "token_type_ids": None}, {}):
            if architecture == "modernbert":
                arguments.pop("token_type_ids", None)
            assert_same_output(model(input_ids=ids, **arguments), plain(input_ids=ids, **arguments))
        assert_same_output(model(ids, mask), plain(ids, mask))
        embedded = base_model_of(model).get_input_embeddings()(ids)
        arguments = {"inputs_embeds": embedded, "attention_mask": mask}
        assert_same_output(model(**arguments), plain(**arguments))
        features = take_prefix(base_model_of(model), **arguments)
        assert_same_output(model(**arguments, **{PREFIX_FEATURES: features}), plain(**arguments))


def test_two_adapters_branch_each_at_their_own_block():
    model = late("bert", 2, {"num_hidden_layers": 4})
    base, batch = base_model_of(model), tiny.inputs("bert")
    first = model(**batch).member_logits
    torch.manual_seed(5)
    model.add_adapter("early", SigmaNormConfig(branch_layer=1, num_members=2, init_scaler_std=1.0, prefix="shared"))
    torch.manual_seed(6)
    model.add_adapter("everywhere", SigmaNormConfig(num_members=3, init_scaler_std=1.0))
    model.eval()
    assert torch.equal(model(**batch).member_logits, first)
    expected = {"default": (2, 4), "early": (1, 2), "everywhere": (None, 3)}
    outputs = {}
    for _ in range(2):
        for name, (block, num_members) in expected.items():
            model.set_adapter(name)
            assert active_branch(base) == block
            output = model(**batch)
            assert output.member_logits.shape[1] == num_members
            assert torch.equal(outputs.setdefault(name, output.member_logits), output.member_logits)
            plain = copy.deepcopy(model)
            branch_at(base_model_of(plain), name, None)
            assert_same_output(output, plain(**batch))
    assert torch.equal(outputs["default"], first)
    for block in blocks_of(model):
        assert sum(isinstance(hook, RepeatRows) for hook in block._forward_pre_hooks.values()) == 1
    model.set_adapter("everywhere")
    model.delete_adapter("everywhere")
    assert torch.equal(model(**batch).member_logits, outputs[model.active_adapter])
    model.set_adapter("early")
    assert torch.equal(model(**batch).member_logits, outputs["early"])
    model.delete_adapter("default")
    assert torch.equal(model(**batch).member_logits, outputs["early"])
    assert torch.equal(model.merge_and_unload(member=1)(**batch).logits, _alone(outputs["early"], 1))


def _alone(member_logits, member):
    return member_logits[:, member]


def has_traces(model):
    return any(isinstance(h, RepeatRows) for module in model.modules() for h in module._forward_pre_hooks.values())


@pytest.mark.parametrize("architecture", representatives())
@torch.no_grad()
def test_models_taken_out_keep_no_trace(architecture):
    expected = tiny.base_model(architecture, **without_randomness(architecture))
    model, batch = late(architecture, prefix="shared"), tiny.inputs(architecture)
    tiny.make_trainable_parts_random(model)
    output = model(**batch)
    member = extract_member(model, 2)
    assert has_traces(model)
    assert not has_traces(member)
    assert tiny.relative_error(member(**batch).logits, output.member_logits[:, 2]) < TOLERANCE
    model.set_adapter("default")
    with model.disable_adapter():
        assert torch.equal(model(**batch).logits, expected(**batch).logits)
    plain = model.unload()
    assert not has_traces(plain)
    assert torch.equal(plain(**batch).logits, expected(**batch).logits)


def test_deleting_the_last_adapter_takes_the_hooks_off():
    model, batch = late("vit"), tiny.inputs("vit")
    base = base_model_of(model)
    model.delete_adapter("default")
    assert not has_traces(base)
    expected = tiny.base_model("vit", **without_randomness("vit"))(**batch).logits
    assert torch.equal(base(**batch).logits, expected)


@pytest.mark.parametrize("architecture", representatives(fast=("bert", "vit")))
@torch.no_grad()
def test_copies_branch_late_too(architecture):
    model, batch = late(architecture, prefix="shared"), tiny.inputs(architecture)
    expected = model(**batch).member_logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert active_branch(base_model_of(other)) == 1
        with member_subset(model, 0):  # of the other model
            assert torch.equal(other(**batch).member_logits, expected)


@pytest.mark.parametrize("architecture", representatives(fast=("vit",)))
@torch.no_grad()
def test_compiled_model_is_one_graph_and_branches_late(architecture):
    model = late(architecture)
    batch = tiny.inputs(architecture, with_labels=False)
    expected = model(**batch).member_logits
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert tiny.relative_error(compiled(**batch).member_logits, expected) < TOLERANCE
    with member_subset(model, [2, 0]):
        assert tiny.relative_error(compiled(**batch).member_logits, expected[:, [2, 0]]) < TOLERANCE
    if architecture not in tiny.CHOICE_ARCHITECTURES:
        features = {PREFIX_FEATURES: take_prefix(base_model_of(model), **batch)}
        assert tiny.relative_error(compiled(**batch, **features).member_logits, expected) < TOLERANCE
    assert tiny.relative_error(compiled(**batch).member_logits, expected) < TOLERANCE


CHECKPOINTED = [name for name in LATE if tiny.model_class(name).supports_gradient_checkpointing]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("prefix", ["frozen", "shared"])
@pytest.mark.parametrize("architecture", representatives(CHECKPOINTED, ("bert", "swin")))
def test_checkpointed_blocks_branch_late_when_they_are_replayed(architecture, prefix, use_reentrant):
    for branch_layer in (0, num_blocks(architecture) - 1):
        model = late(architecture, branch_layer, prefix=prefix)
        batch = tiny.inputs(architecture)
        with member_subset(model, [3, 1]):
            _, wanted = gradients(model, **batch)
        base_model_of(model).activation_checkpointing_enable({"use_reentrant": use_reentrant})
        features = [{}]
        if architecture not in tiny.CHOICE_ARCHITECTURES and active_branch(base_model_of(model)) is not None:
            features.append({PREFIX_FEATURES: take_prefix(base_model_of(model), **batch).detach()})
        for given in features:
            if given and prefix == "shared":
                continue
            model.train()
            with member_subset(model, [3, 1]):
                loss = loss_of(model(**batch, **given))
            with torch.no_grad():
                model(**batch)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert_same_gradients({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, wanted)
            model.zero_grad()


def test_members_on_late_norms_alone_branch_late_without_a_branch_layer(tmp_path):
    base = {"num_hidden_layers": 4, **tiny.without_dropout("vit")}
    model = tiny.ensemble("vit", base=base, target_modules=r"vit\.layers\.[23]\.layernorm.*")
    assert active_branch(base_model_of(model)) == 2
    batch = tiny.inputs("vit")
    output, found = gradients(model, **batch)
    expected, wanted = gradients(without_branch(model), **batch)
    assert_same_output(output, expected)
    assert_same_gradients(found, wanted)
    tiny.base_model("vit", **base).save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    loaded, _ = load_ensemble(tmp_path / "adapter", base_model=str(tmp_path / "base"))
    assert active_branch(base_model_of(loaded)) == 2
    assert torch.equal(loaded(**batch).member_logits, model(**batch).member_logits)


def test_threads_with_different_prefixes_do_not_meet():
    model, batch = late("bert"), tiny.inputs("bert")
    with torch.no_grad():
        features = take_prefix(base_model_of(model), **batch)
        expected = {False: model(**batch).member_logits}
        expected[True] = model(**batch, **{PREFIX_FEATURES: features + 1}).member_logits
    wrong = []

    def work(shifted):
        with torch.no_grad():
            for _ in range(10):
                given = {PREFIX_FEATURES: features + 1} if shifted else {}
                if not torch.equal(model(**batch, **given).member_logits, expected[shifted]):
                    wrong.append(shifted)

    threads = [threading.Thread(target=work, args=(shifted,)) for shifted in (True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_failed_forward_leaves_no_branch_open():
    model, batch = late("bert"), tiny.inputs("bert")
    expected = model(**batch).member_logits
    with pytest.raises(RuntimeError):
        model(**batch, **{PREFIX_FEATURES: torch.zeros(5, 11, 3)})
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        base_model_of(model).bert(batch["input_ids"])
    assert torch.equal(model(**batch).member_logits, expected)


@pytest.mark.parametrize("taken", [None, []])
@pytest.mark.parametrize(("dimensions", "rows"), [(2, 3), (4, 1)])
def test_mask_of_a_single_example_has_the_rows_that_attention_counts(dimensions, rows, taken):
    """Flash attention, which does not run here, is given a mask of tokens; others one that is broadcast."""
    hook = RepeatRows(1, ("hidden_states", "attention_mask"))
    hidden_states, mask = torch.randn(3, 5, 8), torch.ones(1, *[1] * (dimensions - 2), 5)
    forward_pass = ForwardPass(0, (0, 1, 2), 3, True, None, Branch(0, taken=taken))
    (found,), arguments = InForwardPass(hook, forward_pass)(None, (hidden_states, mask), {})
    assert torch.equal(found, hidden_states)
    assert arguments["attention_mask"].shape == (rows, *mask.shape[1:])
