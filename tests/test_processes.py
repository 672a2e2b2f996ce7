"""Training on several processes, and forward passes on several threads as DataParallel makes them."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiny
import torch
import train_tiny

from sigma_nens_hf import member_subset


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--standalone", train_tiny.__file__, str(folder), "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "logs.json").read_text())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return train_tiny.train(tmp_path_factory.mktemp("one_process"), 1)


@pytest.mark.parametrize("architecture", train_tiny.ARCHITECTURES)
def test_two_processes_train_as_one_does(architecture, one_process, two_processes):
    one, two = one_process[architecture], two_processes[architecture]
    assert len(one["steps"]) == len(two["steps"]) == 3
    for alone, together in zip(one["steps"], two["steps"], strict=True):
        for name in ("loss", "grad_norm", "task_loss", "regularizer"):
            assert together[name] == pytest.approx(alone[name], rel=1e-3), name
    for name in ("eval_nll", "eval_accuracy", "eval_ece"):
        assert two["evaluation"][name] == pytest.approx(one["evaluation"][name], rel=2e-3, abs=1e-6), name


def _replica(module, memo):
    """A replica as `torch.nn.parallel.replicate` makes it: modules of its own, plain tensors for parameters."""
    if module in memo:
        return memo[module]
    replica = memo[module] = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(replica, name, None if child is None else _replica(child, memo))
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.clone())
    for name, buffer in module._buffers.items():
        replica._buffers[name] = copy.deepcopy(buffer)
    return replica


@pytest.mark.parametrize("architecture", ["bert", "llama", "vit", "swin", "roberta"])
def test_replicas_on_threads_compute_their_share_of_the_batch(architecture):
    model = tiny.ensemble(architecture)
    batch = tiny.inputs(architecture, 6, with_labels=False)
    outputs, failures = {}, []

    def work(number, replica, part):
        try:
            outputs[number] = replica(**part)
        except Exception as error:  # re-raised in the main thread
            failures.append(error)

    with member_subset(model, [2, 0]):
        expected_of_subset = model(**batch).member_logits
    expected = model(**batch).member_logits
    parts = [{name: tensor[3 * i : 3 * i + 3] for name, tensor in batch.items()} for i in range(2)]
    replicas = [_replica(model, {}) for _ in parts]
    threads = [threading.Thread(target=work, args=(i, replicas[i], parts[i])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    together = torch.cat([outputs[0].member_logits, outputs[1].member_logits])
    assert tiny.relative_error(together, expected) < 1e-5
    together.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "sigma_norm_scaler" in name)
    with member_subset(model, [2, 0]):  # a thread takes the choice of its own, not of the one that made it
        assert tiny.relative_error(model(**batch).member_logits, expected_of_subset) < 1e-6
