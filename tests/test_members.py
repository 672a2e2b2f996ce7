import copy
import pickle
import threading

import pytest
import tiny
import torch
from transformers import DynamicCache

from sigma_nens_hf import extract_member, member_subset
from sigma_nens_hf.architectures import backbone_name
from sigma_nens_hf.members import base_model_of

NUM_MEMBERS = 4
TOLERANCE = 1e-5
# One of each kind, for what hangs on the form of inputs and outputs.
KINDS = [
    "bert", "deberta_v3", "llama", "vit", "deit-teacher", "dinov3", "swin", "convnext", "siglip", "bert-token",
    "bert-choice",
]  # fmt: skip


@pytest.mark.parametrize("with_task_type", [False, True])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.no_grad()
def test_batched_forward_equals_members_one_at_a_time(architecture, with_task_type):
    task_type = (tiny.task_type(architecture) or "SEQ_CLS") if with_task_type else None  # images take it too
    model = tiny.ensemble(architecture, num_members=NUM_MEMBERS, task_type=task_type)
    members = [extract_member(model, k) for k in range(NUM_MEMBERS)]
    for batch_size in (1, NUM_MEMBERS, 5):  # 4: rows of any kind divide by M
        batch = tiny.inputs(architecture, batch_size)
        output = model(**batch)
        outputs = [member(**batch) for member in members]
        alone = torch.stack([one.logits for one in outputs], dim=1)
        assert output.member_logits.shape == (batch_size, NUM_MEMBERS, *outputs[0].logits.shape[1:])
        assert tiny.relative_error(output.member_logits, alone) < TOLERANCE
        spread = (alone[:, 1:] - alone[:, :1]).abs().transpose(0, 1).flatten(1).amax(1).min() / alone.abs().max()
        assert spread > 100 * TOLERANCE
        expected = alone.double().softmax(-1).mean(1)
        torch.testing.assert_close(output.logits.double().softmax(-1), expected, rtol=1e-4, atol=1e-6)
        for name in ("cls_logits", "distillation_logits"):
            if name in outputs[0]:
                expected = torch.stack([one[name] for one in outputs], 1).softmax(-1).mean(1)
                torch.testing.assert_close(output[name].softmax(-1), expected, rtol=1e-4, atol=1e-6)
        if "labels" in batch:
            losses = torch.stack([one.loss for one in outputs])
            torch.testing.assert_close(output.loss, losses.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", tiny.SEQUENCE_ARCHITECTURES)
@torch.no_grad()
def test_padding_does_not_reach_any_member(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture, 5, with_labels=False)
    together = model(**batch).member_logits
    for row in range(5):
        length = int(batch["attention_mask"][row].sum())
        alone = model(input_ids=batch["input_ids"][row : row + 1, :length]).member_logits
        assert tiny.relative_error(together[row : row + 1], alone) < TOLERANCE


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.no_grad()
def test_member_subset_takes_members_in_the_order_given(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture)
    everyone = model(**batch).member_logits
    with member_subset(model, [2, 0]):
        some = model(**batch)
        with member_subset(model, 1):
            one = model(**batch)
    assert tiny.relative_error(some.member_logits, everyone[:, [2, 0]]) < TOLERANCE
    expected = everyone[:, [2, 0]].softmax(-1).mean(1)
    torch.testing.assert_close(some.logits.softmax(-1), expected, rtol=1e-4, atol=1e-6)
    assert one.member_logits.shape[1] == 1
    torch.testing.assert_close(one.logits, everyone[:, 1].log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert model(**batch).member_logits.shape[1] == 4


@pytest.mark.parametrize("members", [[], [0, 0], [4], [-1], 7, True, "0", 1.5])
def test_member_subset_refuses_wrong_indices(members):
    model = tiny.ensemble("bert")
    with pytest.raises(ValueError, match="0 to 3"), member_subset(model, members):
        pass


def test_member_subset_of_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="no sigma-norm adapter"), member_subset(tiny.base_model("bert"), 0):
        pass


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("batch_size", [1, 3, NUM_MEMBERS, 2 * NUM_MEMBERS])
def test_inner_module_called_on_its_own_raises(architecture, batch_size):
    model = tiny.ensemble(architecture, num_members=NUM_MEMBERS)
    base = base_model_of(model)
    inner = base.get_submodule(backbone_name(base))
    batch = tiny.inputs(architecture, batch_size, with_labels=False)
    if architecture in tiny.CHOICE_ARCHITECTURES:
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        inner(**batch)
    model(**tiny.inputs(architecture, batch_size))  # a whole call before must not open the door
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        inner(**batch)


def test_failed_forward_leaves_the_guard_up():
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert", 4, with_labels=False)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(**batch, inputs_embeds=torch.zeros(4, 11, tiny.HIDDEN_SIZE))
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        base_model_of(model).bert(**batch)
    assert model(**batch).member_logits.shape == (4, 4, 3)


def test_pass_left_open_by_an_interrupt_is_closed_by_the_next_one():
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert", 4, with_labels=False)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = base_model_of(model).classifier.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    handle.remove()
    assert model(**batch).member_logits.shape == (4, 4, 3)
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        base_model_of(model).bert(**batch)


@torch.no_grad()
def test_arguments_by_position_and_tuples():
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert")
    expected = model(**batch)
    by_position = model(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(by_position.member_logits, expected.member_logits)
    as_tuple = model(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    torch.testing.assert_close(as_tuple[1], expected.logits)
    torch.testing.assert_close(as_tuple[-1], expected.member_logits)
    model.config.return_dict = False
    assert isinstance(model(**batch), tuple)


@pytest.mark.parametrize("architecture", KINDS)
@torch.no_grad()
def test_tuples_hold_the_same_with_member_logits_last(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture)
    expected = model(**batch)
    values = model(**batch, return_dict=False)
    assert isinstance(values, tuple)
    assert len(values) == len(expected)
    assert torch.equal(values[-1], expected.member_logits)
    for value, (name, wanted) in zip(values, expected.items(), strict=True):
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize("architecture", KINDS)
@torch.no_grad()
def test_hidden_states_are_batch_first_and_those_of_the_members(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture)
    output = model(**batch, output_hidden_states=True)
    member = extract_member(model, 2)(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == len(member.hidden_states)
    for states, alone in zip(output.hidden_states, member.hidden_states, strict=True):
        assert states.shape == (alone.shape[0], NUM_MEMBERS, *alone.shape[1:])  # choices are rows of their own
        assert tiny.relative_error(states[:, 2], alone) < 1e-4
    assert type(output).__name__ == f"Ensemble{type(member).__name__}"


@torch.no_grad()
def test_positions_as_many_as_examples_are_no_examples():
    model = tiny.ensemble("gpt2")
    ids = torch.randint(5, tiny.VOCABULARY, (4, 4))
    positions = torch.arange(4)
    expected = model(input_ids=ids).member_logits
    assert tiny.relative_error(model(input_ids=ids, position_ids=positions).member_logits, expected) < TOLERANCE


@torch.no_grad()
def test_cache_of_a_decoder_is_neither_made_nor_taken():
    model = tiny.ensemble("llama")
    batch = tiny.inputs("llama")
    assert model.config.use_cache
    assert "past_key_values" not in model(**batch)
    with pytest.raises(ValueError, match="cache of keys and values cannot be given"):
        model(**batch, past_key_values=DynamicCache(config=model.config))
    with model.disable_adapter():
        assert model(**batch, use_cache=True).past_key_values is not None


@torch.no_grad()
def test_embeddings_position_ids_and_further_outputs():
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert", with_labels=False)
    expected = model(**batch).member_logits
    embedded = base_model_of(model).bert.embeddings.word_embeddings(batch["input_ids"])
    output = model(
        inputs_embeds=embedded,
        attention_mask=batch["attention_mask"],
        position_ids=torch.arange(11)[None],
        output_hidden_states=True,
    )
    assert tiny.relative_error(output.member_logits, expected) < TOLERANCE
    assert [tuple(state.shape) for state in output.hidden_states] == [(5, 4, 11, tiny.HIDDEN_SIZE)] * 3


def test_loss_normalised_by_a_count_is_the_mean_over_members():
    model = tiny.ensemble("vit")
    batch = tiny.inputs("vit", 6)
    expected = model(**batch).loss
    output = model(**batch, num_items_in_batch=torch.tensor(6))
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("label", [-1, 3])
def test_label_of_no_class_is_named(label):
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert")
    batch["labels"][2] = label
    with pytest.raises(ValueError, match=f"Label {label} names none of the 3 classes"):
        model(**batch)
    batch["labels"][2] = -100
    assert model(**batch).loss.isfinite()


CHECKPOINTED = [name for name in tiny.ARCHITECTURES if tiny.model_class(name).supports_gradient_checkpointing]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("architecture", CHECKPOINTED)
def test_checkpointed_blocks_are_replayed_with_the_members_of_their_forward(architecture, use_reentrant):
    def gradients(checkpointing, other_thread=False):
        model = tiny.ensemble(architecture, base=tiny.without_dropout(architecture))
        model.train()
        if checkpointing:
            base_model_of(model).activation_checkpointing_enable({"use_reentrant": use_reentrant})
        with member_subset(model, [3, 1]):
            loss = _loss(model, tiny.inputs(architecture))
        # The subset has been left, and another forward pass may have happened meanwhile.
        with torch.no_grad():
            model(**tiny.inputs(architecture))
        if other_thread:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients(False)
    assert any(gradient.abs().sum() > 0 for gradient in plain.values())
    for other_thread in (False, True):
        checkpointed = gradients(True, other_thread)
        assert checkpointed.keys() == plain.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-5)


def _loss(model, batch):
    output = model(**batch)
    return output.loss if "loss" in output else output.member_logits.square().mean()


@torch.no_grad()
def test_threads_with_different_subsets_do_not_meet():
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert")
    everyone = model(**batch).member_logits
    wrong, barrier = [], threading.Barrier(4)

    def work(member):
        with torch.no_grad(), member_subset(model, member):
            barrier.wait()
            for _ in range(20):
                alone = model(**batch).member_logits
                if tiny.relative_error(alone, everyone[:, [member]]) > TOLERANCE:
                    wrong.append(member)

    threads = [threading.Thread(target=work, args=(member,)) for member in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("architecture", KINDS)
@torch.no_grad()
def test_model_and_output_survive_pickle(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture)
    copy = pickle.loads(pickle.dumps(model))
    output = model(**batch)
    assert torch.equal(copy(**batch).member_logits, output.member_logits)
    again = pickle.loads(pickle.dumps(output))
    assert type(again) is type(output)
    assert torch.equal(again.member_logits, output.member_logits)


def test_guard_survives_pickle():
    copy = pickle.loads(pickle.dumps(tiny.ensemble("bert")))
    batch = tiny.inputs("bert")
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        base_model_of(copy).bert(batch["input_ids"])


@pytest.mark.parametrize("architecture", tiny.representatives("deberta_v3", "llama", "swin", "bert-choice"))
@torch.no_grad()
def test_compiled_model_is_one_graph_and_follows_a_switch_of_members(architecture):
    _compile_and_switch(architecture, TOLERANCE, backend="eager", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "llama", "vit"])
@torch.no_grad()
def test_compiler_of_torch_changes_no_logits(architecture):
    _compile_and_switch(architecture, 1e-4)


def _compile_and_switch(architecture, tolerance, **options):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture, with_labels=False)
    expected = model(**batch).member_logits
    torch.compiler.reset()
    compiled = torch.compile(model, **options)
    assert tiny.relative_error(compiled(**batch).member_logits, expected) < tolerance
    with member_subset(model, [2, 0]):
        assert tiny.relative_error(compiled(**batch).member_logits, expected[:, [2, 0]]) < tolerance
    assert tiny.relative_error(compiled(**batch).member_logits, expected) < tolerance


def test_copy_does_not_share_the_choice_of_members():
    model = tiny.ensemble("bert")
    other = copy.deepcopy(model)
    batch = tiny.inputs("bert")
    with member_subset(model, 0):
        assert model(**batch).member_logits.shape[1] == 1
        assert other(**batch).member_logits.shape[1] == 4
