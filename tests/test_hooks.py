"""Hooks that are taken off, of every sort that this package puts on."""

import torch
from torch import nn

from sigma_nens_hf.hooks import take_off_hooks


class Ours:
    def __call__(self, *arguments):
        raise AssertionError("it was taken off")


def test_hooks_of_a_class_are_taken_off_and_others_stay():
    module, called = nn.Sequential(nn.Linear(2, 2)), []
    for inner in (module, module[0]):
        inner.register_forward_pre_hook(Ours())
        inner.register_forward_pre_hook(Ours(), with_kwargs=True)
        inner.register_forward_hook(Ours(), with_kwargs=True, always_call=True)
        inner.register_forward_pre_hook(lambda m, args, kwargs: called.append("before"), with_kwargs=True)
        inner.register_forward_hook(lambda m, args, kwargs, output: called.append("after"), with_kwargs=True)
    take_off_hooks(module, Ours)
    assert len(module[0]._forward_pre_hooks) == 3
    take_off_hooks(module[0], Ours)
    module(torch.zeros(1, 2))
    assert called == ["before", "before", "after", "after"]
    for notes in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        assert len(getattr(module, notes)) == (0 if notes.endswith("called") else 1)
