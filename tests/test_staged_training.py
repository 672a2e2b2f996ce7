import shutil

import pytest
import tiny
import torch
from test_late_branching import late
from test_shared_prefix import shared_layers, trainable_copies
from test_trainer import dataset, step_logs, trainer_for
from transformers import EarlyStoppingCallback, TrainerCallback

from sigma_nens_hf.staged_training import STAGE_FOLDER


class KilledError(Exception):
    pass


class Kill(TrainerCallback):
    """Stands for a kill at a step of one of the two stages."""

    def __init__(self, stage, step):
        self.stage, self.step = stage, step

    def on_step_end(self, args, state, control, **kwargs):
        is_first = args.output_dir.endswith(STAGE_FOLDER)
        if is_first == (self.stage == 1) and state.global_step == self.step:
            raise KilledError


class Watch(TrainerCallback):
    """Notes the trained parameters at the begin and the end of every stage."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.seen.append(all_parameters(model))

    on_train_end = on_train_begin


def all_parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".sigma_norm_" in name}


def staged_trainer(folder, model=None, callbacks=(), **arguments):
    model = tiny.ensemble("bert", branch_layer=1, prefix="staged") if model is None else model  # dropout is on
    settings = {"save_strategy": "steps", "save_steps": 2, "diversity_weight": 0.5, "prefix_epochs": None, **arguments}
    return trainer_for(model, folder, dataset("bert"), {"callbacks": list(callbacks)}, **settings)


def is_copy(model, name):
    return any(f"{layer}.sigma_norm" in name for layer in shared_layers(model))


def test_first_stage_moves_one_member_and_the_copies_and_the_second_all_members(tmp_path):
    watch = Watch()
    trainer = staged_trainer(tmp_path, callbacks=[watch])
    model = trainer.model
    trainer.train()
    start, tuned, begin, end = watch.seen
    norms = [name for name in start if "scaler" in name or "norm_bias" in name]
    for name in start:
        if is_copy(model, name):
            assert not torch.equal(start[name], tuned[name])
            assert torch.equal(tuned[name], begin[name])
            assert torch.equal(begin[name], end[name])
            continue
        assert not torch.equal(start[name][0], tuned[name][0])
        assert torch.equal(start[name][1:], tuned[name][1:])
        assert torch.equal(begin[name], start[name])
        for member in range(len(start[name])):  # of a scale that members share there is one
            assert not torch.equal(begin[name][member], end[name][member])
    assert len(norms) == 10
    assert model.peft_config["default"].prefix_is_tuned
    assert trainable_copies(model) == {False}
    assert len(step_logs(trainer)) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", STAGE_FOLDER}
    assert {path.name for path in (tmp_path / STAGE_FOLDER).iterdir()} == {"checkpoint-2", "checkpoint-4"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    trainer = staged_trainer(tmp_path_factory.mktemp("uninterrupted"), max_steps=5)
    trainer.train()
    return all_parameters(trainer.model), step_logs(trainer)


def resumed_equals(uninterrupted, folder, **arguments):
    expected, logs = uninterrupted
    torch.manual_seed(99)
    resumed = staged_trainer(folder, max_steps=5, **arguments)
    resumed.train(resume_from_checkpoint=True)
    found = all_parameters(resumed.model)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert step_logs(resumed)[-1]["loss"] == logs[-1]["loss"]
    assert resumed.model.peft_config["default"].prefix_is_tuned
    assert trainable_copies(resumed.model) == {False}


@pytest.mark.parametrize(
    ("stage", "step"),
    [(1, 3), (2, 1), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, 5), (2, 3), (2, 5)))],
)
def test_killed_and_resumed_equals_uninterrupted(stage, step, tmp_path, uninterrupted):
    killed = staged_trainer(tmp_path, callbacks=[Kill(stage, step)], max_steps=5)
    with pytest.raises(KilledError):
        killed.train()
    resumed_equals(uninterrupted, tmp_path)


@pytest.mark.parametrize("save_steps", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_between_the_stages_and_resumed_equals_uninterrupted(save_steps, tmp_path, uninterrupted):
    """Whether the last checkpoint of the first stage is of its end or not."""

    class KillBetween(Kill):
        def on_train_begin(self, args, *_, **kwargs):
            if not args.output_dir.endswith(STAGE_FOLDER):
                raise KilledError

    killed = staged_trainer(tmp_path, callbacks=[KillBetween(0, 0)], max_steps=5, save_steps=save_steps)
    with pytest.raises(KilledError):
        killed.train()
    if save_steps == 2:
        shutil.rmtree(tmp_path / STAGE_FOLDER / "checkpoint-5", ignore_errors=True)
    resumed_equals(uninterrupted, tmp_path)


@pytest.mark.slow
def test_killed_while_members_start_and_resumed_equals_uninterrupted(tmp_path, uninterrupted, monkeypatch):
    def interrupt(*_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("sigma_nens_hf.staged_training.freeze_prefix", interrupt)
        with pytest.raises(KilledError):
            staged_trainer(tmp_path, max_steps=5).train()
    resumed_equals(uninterrupted, tmp_path)


def test_nothing_to_resume_from_is_refused(tmp_path):
    for trainer in (staged_trainer(tmp_path), staged_trainer(tmp_path, save_strategy="no")):
        with pytest.raises(ValueError, match="no complete checkpoint"):
            trainer.train(resume_from_checkpoint=True)
        assert not trainer.model.peft_config["default"].prefix_is_tuned


def test_checkpoint_of_the_first_stage_is_not_taken_for_one_of_the_second(tmp_path):
    staged_trainer(tmp_path).train()
    checkpoint = tmp_path / STAGE_FOLDER / "checkpoint-2"
    trainer = staged_trainer(tmp_path)
    with pytest.raises(ValueError, match=r"is of the first stage.*resume_from_checkpoint=True"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not trainer.model.peft_config["default"].prefix_is_tuned
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4


def test_checkpoint_of_another_prefix_is_refused_by_name(tmp_path):
    staged_trainer(tmp_path, tiny.ensemble("bert", branch_layer=1, prefix="shared")).train()
    with pytest.raises(ValueError, match="of a run with prefix='shared', which cannot go on with prefix='staged'"):
        staged_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_optimizer_of_ones_own_is_refused(tmp_path):
    trainer = staged_trainer(tmp_path)
    before = all_parameters(trainer.model)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
    with pytest.raises(ValueError, match="trains twice, each time with an optimizer of its own"):
        trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in all_parameters(trainer.model).items())


@pytest.mark.parametrize(("prefix_epochs", "steps"), [(0.5, 2), pytest.param(None, 4, marks=pytest.mark.slow)])
def test_first_stage_has_passes_of_its_own(prefix_epochs, steps, tmp_path):
    done = []

    class Count(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            done.append((args.output_dir.endswith(STAGE_FOLDER), state.global_step))

    trainer = staged_trainer(
        tmp_path, callbacks=[Count()], prefix_epochs=prefix_epochs, max_steps=-1, num_train_epochs=1
    )
    trainer.train()
    assert done == [(True, steps), (False, 4)]
    assert trainer.args.num_train_epochs == 1
    assert trainer.args.output_dir == str(tmp_path)
    assert trainer.args.diversity_weight == 0.5


@pytest.mark.parametrize("prefix_epochs", [0, -1, float("nan")])
def test_number_of_passes_must_be_positive(prefix_epochs, tmp_path):
    with pytest.raises(ValueError, match="prefix_epochs must be finite and positive"):
        staged_trainer(tmp_path, prefix_epochs=prefix_epochs)


@pytest.mark.slow
def test_trained_again_there_is_no_first_stage_any_more(tmp_path):
    watch = Watch()
    trainer = staged_trainer(tmp_path, callbacks=[watch])
    trainer.train()
    first = all_parameters(trainer.model)
    trainer.train()
    assert len(watch.seen) == 6
    for name, tensor in all_parameters(trainer.model).items():
        assert torch.equal(tensor, first[name]) == is_copy(trainer.model, name)
    trainer.model.save_pretrained(tmp_path / "adapter")


def test_evaluation_and_early_stopping_are_of_the_second_stage(tmp_path):
    evaluated = []

    class Note(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            evaluated.append((args.output_dir.endswith(STAGE_FOLDER), state.global_step))

    trainer = staged_trainer(
        tmp_path, callbacks=[Note(), EarlyStoppingCallback(1)], eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="nll", scaler_learning_rate=0.0, learning_rate=0.0,
        scale_learning_rate=0.0, modules_to_save_learning_rate=0.0, max_steps=8,
    )  # fmt: skip
    trainer.train()
    assert evaluated == [(False, 2), (False, 4)]  # no better, so it stops
    assert trainer.args.load_best_model_at_end


def test_first_stage_is_not_pushed(tmp_path):
    trainer = staged_trainer(tmp_path)
    trainer.args.push_to_hub = True
    pushed = []
    trainer._push_from_checkpoint = pushed.append
    trainer._finish_current_push = lambda: None
    trainer.train()
    assert [STAGE_FOLDER in str(folder) for folder in pushed] == [False, False]


def test_members_of_the_other_adapter_stay_as_they_are(tmp_path):
    model = late("bert", prefix="staged")
    model.add_adapter("other", model.peft_config["default"].__class__(branch_layer=1, prefix="shared"))
    model.set_adapter("default")
    before = all_parameters(model)
    trainer = staged_trainer(tmp_path, model, max_steps=2)
    trainer.train()
    after = all_parameters(model)
    for name in before:
        if name.endswith(".other"):
            assert torch.equal(before[name], after[name])
    assert not model.peft_config["other"].prefix_is_tuned
    model.set_adapter("other")
    assert trainable_copies(model) == {True}


@pytest.mark.slow
def test_modules_that_members_share_go_on_from_the_first_stage(tmp_path):
    seen = []

    class Note(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            seen.append([p.detach().clone() for n, p in model.named_parameters() if "pooler.modules_to_save" in n])

        on_train_end = on_train_begin

    model = late("bert", prefix="staged", modules_to_save=["pooler"], member_heads="all")
    staged_trainer(tmp_path, model, [Note()], max_steps=2).train()
    for start, tuned, begin, end in zip(*seen, strict=True):
        assert not torch.equal(start, tuned)
        assert torch.equal(tuned, begin)
        assert not torch.equal(begin, end)


@pytest.mark.parametrize("resumes", [False, True])
def test_same_trainer_goes_on_after_an_interrupt_in_the_first_stage(resumes, tmp_path):
    kill = Kill(1, 3)
    trainer = staged_trainer(tmp_path, callbacks=[kill], max_steps=5)
    before = {name: p for name, p in all_parameters(trainer.model).items() if not is_copy(trainer.model, name)}
    with pytest.raises(KilledError):
        trainer.train()
    after = all_parameters(trainer.model)
    assert all(torch.equal(after[name], start) for name, start in before.items())
    trainer.remove_callback(kill)
    trainer.train(resume_from_checkpoint=resumes or None)
    assert trainer.model.peft_config["default"].prefix_is_tuned


def test_nothing_is_evaluated_in_the_first_stage(tmp_path):
    evaluations = []

    class Note(TrainerCallback):
        def on_evaluate(self, args, *_, **kwargs):
            evaluations.append(args.output_dir)

    trainer = staged_trainer(tmp_path, callbacks=[Note()], max_steps=2, eval_on_start=True)
    trainer.train()
    assert evaluations == [str(tmp_path)]
